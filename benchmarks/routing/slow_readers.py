"""What clients that do not read cost the router: streams that nobody reads for a while, and then all at once.

    python -m benchmarks.routing.slow_readers --model smollm2.gguf [--max-unsent-bytes 262144]

A worker without a model (wire.py) gives every stream a token in each step. Each client reads the first token, then
nothing for some seconds, then all the rest. Its flow-control window does not grow: otherwise its own process would hold
what comes. Every client checks that it got all tokens, each once.
"""

import argparse
import asyncio
import time
from pathlib import Path

import grpc

from benchmarks.routing.wire import Stack
from protos import inference_pb2, inference_pb2_grpc, sampling_pb2
from protos.channel import INFERENCE_CHANNEL_OPTIONS


async def read(stub: inference_pb2_grpc.InferenceStub, tokens: int, pause_s: float) -> tuple[int, int]:
    """One stream. Returns how many messages came, and the largest one's size in bytes."""
    request = inference_pb2.GenerateRequest(
        model="demo",
        token_ids=inference_pb2.TokenIds(ids=[1]),
        sampling=sampling_pb2.SamplingParams(temperature=0),
        stopping=sampling_pb2.StopConditions(max_tokens=tokens),
        output=inference_pb2.OutputOptions(text=True, token_ids=True),
    )
    call = stub.Generate(request, timeout=600)
    messages = largest = ids = 0
    while (response := await call.read()) is not grpc.aio.EOF:
        assert isinstance(response, inference_pb2.GenerateResponse)
        messages += 1
        largest = max(largest, response.ByteSize())
        for delta in (event.delta for event in response.events if event.HasField("delta")):
            assert delta.first_index == ids, "a token is missing, or came twice"
            if not ids:
                await asyncio.sleep(pause_s)
            ids += len(delta.token_ids)
    assert ids == tokens
    return messages, largest


async def measure(args: argparse.Namespace) -> None:
    flags = "--max-unsent-bytes", str(args.max_unsent_bytes)
    async with (
        Stack(args.model, args.streams, *flags) as stack,
        grpc.aio.insecure_channel(stack.address, options=INFERENCE_CHANNEL_OPTIONS) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(read(stub, 100, 0) for _ in range(args.streams)))
        before, most = stack.router_memory(), 0
        started = time.perf_counter()
        reading = asyncio.gather(*(read(stub, args.tokens, args.pause) for _ in range(args.streams)))
        while not reading.done():
            await asyncio.wait([reading], timeout=0.2)
            most = max(most, stack.router_memory())
        messages, largest = zip(*reading.result(), strict=True)
        seconds = time.perf_counter() - started
        print(f"{args.streams} streams of {args.tokens} tokens, {args.max_unsent_bytes} bytes unsent at most")
        print(f"    not read for {args.pause:g} s, all complete after {seconds:.1f} s")
        print(f"    the router's memory: {before / 1e6:.0f} MB before, at most {(most - before) / 1e6:.1f} MB more")
        print(f"    {args.streams * args.tokens / sum(messages):.1f} tokens a message, at most {max(largest)} bytes")


def main() -> None:
    """Parses the flags and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the demo model, for its tokenizer")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=20_000, help="of each stream")
    parser.add_argument("--pause", type=float, default=20, help="seconds without reading")
    parser.add_argument("--max-unsent-bytes", type=int, default=4 * 1024 * 1024)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

"""What tokens cost the router on their way from worker to client, and what it adds to the time of a single request.

    python -m benchmarks.routing.wire --model smollm2.gguf [--streams 64 256]

A worker process without a model answers at once, a real router process stands between it and the clients here. Tokens
are counted per second of the router's processor time, since three processes share what cores there are: it is what one
core spent on nothing else would carry. Every client checks that it got all of its tokens.
"""

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from protos import inference_pb2, inference_pb2_grpc, sampling_pb2, worker_pb2, worker_pb2_grpc
from protos.channel import SERVER_OPTIONS

FIRST_TOKEN, TOKENS = 1000, 1000  # ordinary words in the demo model's vocabulary
Slots = dict[tuple[int, int], list[int]]  # by slot and generation: tokens sent, tokens wanted


class InstantWorker(worker_pb2_grpc.WorkerServicer):
    """Gives every sequence a token in each StepBatch, as fast as its router grants credit.

    Args:
        slots: how many it grants.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        replies: list[worker_pb2.WorkerMessage] = []
        admitted: list[worker_pb2.Admitted] = []
        cancelled: list[worker_pb2.CancelSlot] = []
        running: Slots = {}
        wake = asyncio.Event()
        credit = 0

        async def read() -> None:
            nonlocal credit
            async for message in request_iterator:
                match message.WhichOneof("message"):
                    case "submit":
                        submit = message.submit
                        running[submit.slot, submit.generation] = [submit.num_emitted, submit.max_tokens]
                        admitted.append(worker_pb2.Admitted(slot=submit.slot, generation=submit.generation))
                    case "cancel":
                        if running.pop((message.cancel.slot, message.cancel.generation), None):
                            cancelled.append(message.cancel)
                    case "credit":
                        credit += message.credit.step_batches
                    case "ping":
                        replies.append(worker_pb2.WorkerMessage(pong=worker_pb2.Pong(nonce=message.ping.nonce)))
                wake.set()

        hello = worker_pb2.Hello(
            protocol_version=2, worker_id="instant", epoch=secrets.randbits(63), model="demo", manifest_hash="m",
            vocab_size=49152, block_size=16, num_blocks=1 << 20, max_model_len=1 << 20, max_num_seqs=self._slots,
            max_num_batched_tokens=1 << 20, max_slots=self._slots,
        )  # fmt: skip
        reader = asyncio.create_task(read())
        try:
            yield worker_pb2.WorkerMessage(hello=hello)
            step = 0
            while True:
                while replies:
                    yield replies.pop(0)
                if (running or cancelled) and credit:
                    credit -= 1
                    step += 1
                    yield worker_pb2.WorkerMessage(step_batch=_step(step, running, admitted, cancelled))
                    admitted.clear()
                    cancelled.clear()
                    # Submits and pings are read between two batches.
                    await asyncio.sleep(0)
                    continue
                wake.clear()
                await wake.wait()
        finally:
            reader.cancel()


def _step(
    step: int, running: Slots, admitted: list[worker_pb2.Admitted], cancelled: list[worker_pb2.CancelSlot]
) -> worker_pb2.StepBatch:
    """A token for each sequence; those that have all of theirs end."""
    batch = worker_pb2.StepBatch(step=step, admitted=admitted)
    for gone in cancelled:
        batch.finished.add(slot=gone.slot, generation=gone.generation, reason=sampling_pb2.FINISH_REASON_CANCELLED)
    for (slot, generation), progress in list(running.items()):
        batch.slots.append(slot)
        batch.generations.append(generation)
        batch.first_indices.append(progress[0])
        batch.counts.append(1)
        batch.token_ids.append(FIRST_TOKEN + (slot + progress[0]) % TOKENS)
        progress[0] += 1
        if progress[0] == progress[1]:
            del running[slot, generation]
            usage = sampling_pb2.Usage(prompt_tokens=1, completion_tokens=progress[0])
            reason = sampling_pb2.FINISH_REASON_LENGTH
            batch.finished.add(slot=slot, generation=generation, reason=reason, usage=usage)
    return batch


class InstantInference(inference_pb2_grpc.InferenceServicer):
    """The router's own call, answered without a worker: what any server would take for it."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        usage = sampling_pb2.Usage(prompt_tokens=1, completion_tokens=request.stopping.max_tokens)
        finished = inference_pb2.Finished(usage=usage, reason=sampling_pb2.FINISH_REASON_LENGTH)
        started = inference_pb2.Started(request_id="gen", model=request.model, prompt_tokens=1)
        yield inference_pb2.GenerateResponse(
            events=[
                inference_pb2.GenerateEvent(started=started),
                inference_pb2.GenerateEvent(delta=inference_pb2.Delta(text=" word")),
                inference_pb2.GenerateEvent(finished=finished),
            ]
        )


async def serve_worker(slots: int) -> None:
    """The worker process: prints its port, and ends with its standard input."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(InstantWorker(slots), server)
    inference_pb2_grpc.add_InferenceServicer_to_server(InstantInference(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


class Stack:
    """Worker and router, as an async context manager.

    Args:
        model: for its tokenizer.
        slots: of the worker.
        router_flags: beside those for model, port and worker.
    """

    def __init__(self, model: Path, slots: int, *router_flags: str) -> None:
        self._model, self._slots, self._router_flags = model, slots, router_flags

    async def __aenter__(self) -> "Stack":
        pipe = asyncio.subprocess.PIPE
        self._worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.routing.wire", "--serve-worker", str(self._slots), stdin=pipe, stdout=pipe
        )
        assert self._worker.stdout is not None
        port = int(await self._worker.stdout.readline())
        self.worker = f"127.0.0.1:{port}"
        self._router = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", "--model", str(self._model), "--port", "0", "--served-model-name", "demo",
            "--worker-urls", f"127.0.0.1:{port}", "--max-num-queued-reqs", "4096",
            *self._router_flags, stderr=pipe,
        )  # fmt: skip
        assert self._router.stderr is not None
        address = ""
        async with asyncio.timeout(60):
            while "is ready" not in (line := (await self._router.stderr.readline()).decode()):
                if not line:
                    raise RuntimeError("the router ended; run it by itself to see why")
                if "listening on" in line:
                    address = "127.0.0.1:" + line.split("127.0.0.1:")[1].split(",")[0].strip()
        self._log = asyncio.create_task(self._router.stderr.read())
        self.address = address
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.channel.close()
        self._router.terminate()
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        await asyncio.gather(self._router.wait(), self._worker.wait())
        await self._log

    def router_seconds(self) -> float:
        """Processor time that the router has used."""
        fields = Path(f"/proc/{self._router.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def router_memory(self) -> int:
        """Bytes of the router that are resident."""
        return int(Path(f"/proc/{self._router.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def generate(
        self, tokens: int, output: inference_pb2.OutputOptions, stub: "inference_pb2_grpc.InferenceStub | None" = None
    ) -> int:
        """One request, through the router unless there is a ``stub``. Returns how many messages came; raises
        AssertionError when tokens are missing."""
        request = inference_pb2.GenerateRequest(
            model="demo",
            token_ids=inference_pb2.TokenIds(ids=[1]),
            sampling=sampling_pb2.SamplingParams(temperature=0),
            stopping=sampling_pb2.StopConditions(max_tokens=tokens),
            output=output,
        )
        messages, ids = 0, 0
        async for response in (stub or self.stub).Generate(request, timeout=300):
            messages += 1
            for event in response.events:
                if event.HasField("delta"):
                    ids += len(event.delta.token_ids)
                elif event.HasField("finished"):
                    assert event.finished.usage.completion_tokens == tokens
        assert not output.token_ids or ids == tokens
        return messages


async def direct_times(address: str, requests: int) -> list[float]:
    """Milliseconds from a Submit to its end, straight at the worker, one at a time."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Connect()
        await call.read()
        times = []
        for generation in range(1, requests + 1):
            started = time.perf_counter()
            submit = worker_pb2.Submit(slot=0, generation=generation, max_tokens=1)
            await call.write(worker_pb2.RouterMessage(credit=worker_pb2.Credit(step_batches=1)))
            await call.write(worker_pb2.RouterMessage(submit=submit))
            while not (await call.read()).step_batch.finished:
                pass
            times.append((time.perf_counter() - started) * 1e3)
        call.cancel()
    return times


MODES = {
    "text, one message at the end": inference_pb2.OutputOptions(text=True, final_only=True),
    "ids, one message at the end": inference_pb2.OutputOptions(text=False, token_ids=True, final_only=True),
    "text, streamed": inference_pb2.OutputOptions(text=True),
}


ROUNDS = 10
BARE, ROUTED = "the same call, answered by a bare server", "through the router to a worker"


async def measure(model: Path, streams: list[int], tokens: int, requests: int) -> None:
    for count in streams:
        async with Stack(model, count) as stack:
            await asyncio.gather(*(stack.generate(50, MODES["text, streamed"]) for _ in range(count)))
            for name, output in MODES.items():
                before = stack.router_seconds()
                messages = sum(await asyncio.gather(*(stack.generate(tokens, output) for _ in range(count))))
                used = stack.router_seconds() - before
                rate = count * tokens / used
                print(f"{count:>5} streams, {name:<29}: {rate / 1e3:7.0f} k tokens a second of processor time, "
                      f"{count * tokens / messages:5.1f} tokens a message", flush=True)  # fmt: skip
    async with Stack(model, 4) as stack, grpc.aio.insecure_channel(stack.worker) as channel:
        bare = inference_pb2_grpc.InferenceStub(channel)
        times: dict[str, list[float]] = {}
        used = 0.0
        for _ in range(ROUNDS):  # in turns: whatever else the machine does meets both
            times.setdefault(BARE, []).extend(await one_by_one(stack, requests // ROUNDS, bare))
            before = stack.router_seconds()
            times.setdefault(ROUTED, []).extend(await one_by_one(stack, requests // ROUNDS, stack.stub))
            used += stack.router_seconds() - before
        times["the worker's stream, open already"] = await direct_times(stack.worker, requests)
    print(f"one request of one token at a time, {requests} of them, ms at p50 and p99:")
    for name, each in times.items():
        print(f"    {name}: {statistics.median(each):.2f}, {sorted(each)[int(len(each) * 0.99)]:.2f}")
    added = statistics.median(times[ROUTED]) - statistics.median(times[BARE])
    print(
        f"    added by the router and its hop: {added:.2f}; its processor time {used / requests * 1e3:.2f} ms a request"
    )


async def one_by_one(stack: Stack, requests: int, stub: inference_pb2_grpc.InferenceStub) -> list[float]:
    """Milliseconds of each request."""
    times = []
    for _ in range(requests):
        started = time.perf_counter()
        await stack.generate(1, MODES["text, streamed"], stub)
        times.append((time.perf_counter() - started) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the demo model, for its tokenizer")
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--requests", type=int, default=1000, help="one at a time")
    parser.add_argument("--serve-worker", type=int, metavar="SLOTS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_worker:
        asyncio.run(serve_worker(args.serve_worker))
    elif args.model is None:
        parser.error("--model is needed")
    else:
        asyncio.run(measure(args.model, args.streams, args.tokens, args.requests))


if __name__ == "__main__":
    main()

"""A gRPC client that streams an answer: ``python docs/grpc_client.py "Why is the sky blue?"``.

It needs grpcio and this tree's ``protos`` package, nothing else of Quire. ``--address`` names the router.
"""

import argparse
import asyncio
import sys

import grpc

from protos.inference_pb2 import Chat, ChatMessage, GenerateRequest, ListModelsRequest
from protos.inference_pb2_grpc import InferenceStub
from protos.sampling_pb2 import FinishReason, SamplingParams, StopConditions


async def ask(address: str, question: str) -> None:
    """Prints the answer of the router's first model while it is generated."""
    async with grpc.aio.insecure_channel(address) as channel:
        inference = InferenceStub(channel)
        models = await inference.ListModels(ListModelsRequest(), timeout=5)
        request = GenerateRequest(
            model=models.models[0].name,
            chat=Chat(messages=[ChatMessage(role="user", content=question)]),
            sampling=SamplingParams(temperature=0.0),
            stopping=StopConditions(max_tokens=256),
        )
        # Leaving this loop early cancels the request; the timeout is its deadline on the server too.
        async for response in inference.Generate(request, timeout=120):
            for event in response.events:
                if event.HasField("delta"):
                    sys.stdout.write(event.delta.text)
                    sys.stdout.flush()
                elif event.HasField("finished"):
                    usage = event.finished.usage
                    reason = FinishReason.Name(event.finished.reason)
                    sys.stdout.write(f"\n[{reason}, {usage.prompt_tokens} + {usage.completion_tokens} tokens]\n")


def main() -> int:
    """Asks the question on the command line. Returns 1 when the router refuses or is not there."""
    parser = argparse.ArgumentParser(description="Stream an answer over gRPC.")
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--address", default="127.0.0.1:50051", help="of the router (default %(default)s)")
    args = parser.parse_args()
    try:
        asyncio.run(ask(args.address, args.question))
    except grpc.aio.AioRpcError as error:
        sys.stderr.write(f"{args.address}: {error.code().name}: {error.details()}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

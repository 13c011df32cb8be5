"""A gRPC client that streams an answer: ``python docs/grpc_client.py "Why is the sky blue?"``.

It needs grpcio and this tree's ``protos`` package, nothing else of Quire. ``--address`` names the router. A key, where
it asks for one, comes from the variable QUIRE_API_KEY; ``--ssl-ca-certs`` turns TLS on.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

import grpc

from protos.api_keys import key_metadata
from protos.channel import INFERENCE_CHANNEL_OPTIONS, open_channel
from protos.inference_pb2 import Chat, ChatMessage, GenerateRequest, ListModelsRequest
from protos.inference_pb2_grpc import InferenceStub
from protos.sampling_pb2 import FinishReason, SamplingParams, StopConditions
from protos.tls import ClientTls


async def ask(address: str, question: str, key: str = "", tls: ClientTls | None = None) -> None:
    """Prints the answer of the router's first model while it is generated."""
    async with open_channel(address, INFERENCE_CHANNEL_OPTIONS, tls) as channel:
        inference = InferenceStub(channel)
        metadata = key_metadata(key)  # authorization: Bearer KEY
        models = await inference.ListModels(ListModelsRequest(), timeout=5, metadata=metadata)
        request = GenerateRequest(
            model=models.models[0].name,
            chat=Chat(messages=[ChatMessage(role="user", content=question)]),
            sampling=SamplingParams(temperature=0.0),
            stopping=StopConditions(max_tokens=256),
        )
        # Leaving this loop early cancels the request; the timeout is its deadline on the server too.
        async for response in inference.Generate(request, timeout=120, metadata=metadata):
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
    parser.add_argument("--ssl-ca-certs", type=Path, help="PEM; authorities that vouch for the router")
    args = parser.parse_args()
    tls = ClientTls(args.ssl_ca_certs) if args.ssl_ca_certs else None
    try:
        asyncio.run(ask(args.address, args.question, os.environ.get("QUIRE_API_KEY", ""), tls))
    except grpc.aio.AioRpcError as error:
        sys.stderr.write(f"{args.address}: {error.code().name}: {error.details()}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

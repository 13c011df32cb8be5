"""Ten times more requests at once than three workers can carry: how fast refusals are, and what becomes of the others.

    python -m benchmarks.routing.burst --model smollm2.gguf
    python -m benchmarks.routing.burst --model smollm2.gguf --requests 1200 --queued 2000 --deadline 120

Workers are real processes whose model is a hash (tests/chaos). All requests come within a second, each with a deadline;
the router's queue holds some of them and refuses the rest, or, in the second form, holds all. Times are the clients',
who share the cores with all others.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc

from protos import inference_pb2, sampling_pb2
from tests.chaos.cluster import Cluster

PROMPT, TOKENS = 40, 40


class Burst:
    """Requests and what became of them.

    Args:
        cluster: router and workers.
        deadline: seconds that each request has.
    """

    def __init__(self, cluster: Cluster, deadline: float) -> None:
        self._cluster = cluster
        self._deadline = deadline
        self.refused: list[float] = []
        self.kept: list[float] = []
        self.missed: list[float] = []
        self.first: list[float] = []  # until the first text
        self.codes: Counter[str] = Counter()

    async def ask(self, number: int) -> None:
        started = time.perf_counter()
        request = inference_pb2.GenerateRequest(
            model="model",
            token_ids=inference_pb2.TokenIds(ids=[1000 + (number + place) % 1000 for place in range(PROMPT)]),
            sampling=sampling_pb2.SamplingParams(temperature=0),
            stopping=sampling_pb2.StopConditions(max_tokens=TOKENS),
        )
        begun = False
        try:
            async for response in self._cluster.stub.Generate(request, timeout=self._deadline):
                if not begun and any(event.HasField("delta") for event in response.events):
                    begun = True
                    self.first.append(time.perf_counter() - started)
            self.kept.append(time.perf_counter() - started)
        except grpc.aio.AioRpcError as error:
            self.codes[error.code().name] += 1
            refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED or not begun
            (self.refused if refused else self.missed).append(time.perf_counter() - started)


def quantiles(times: list[float]) -> str:
    times = sorted(times)
    if not times:
        return "none"
    return (
        " / ".join(f"{times[min(int(len(times) * share), len(times) - 1)] * 1e3:.1f}" for share in (0.5, 0.99)) + " ms"
    )


async def measure(args: argparse.Namespace) -> None:
    with tempfile.NamedTemporaryFile("w", prefix="quire-burst-", suffix=".log") as log:
        flags = "--max-num-queued-reqs", str(args.queued)
        async with Cluster(args.model, 3, log, 0.02, *flags) as cluster:
            warm = Burst(cluster, 60)
            await asyncio.gather(*(warm.ask(number) for number in range(60)))
            burst = Burst(cluster, args.deadline)
            before, most = cluster.router_memory(), 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, cluster.router_memory())
                    await asyncio.sleep(0.1)

            watching = asyncio.create_task(watch())

            async def later(number: int) -> None:
                await asyncio.sleep(number / args.requests)
                await burst.ask(number)

            await asyncio.gather(*(later(number) for number in range(args.requests)))
            watching.cancel()
            admitted = len(burst.kept) + len(burst.missed)
            print(f"{args.requests} requests in a second, 72 slots, {args.queued} places in the queue, p50 / p99:")
            print(f"    {len(burst.refused)} refused after {quantiles(burst.refused)}; codes {dict(burst.codes)}")
            print(f"    {admitted} admitted, {len(burst.kept)} of them kept their deadline of {args.deadline:g} s, "
                  f"after {quantiles(burst.kept)}; first text after {quantiles(burst.first)}")  # fmt: skip
            print(f"    the router's memory: {before / 1e6:.0f} MB before, at most {most / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the demo model, for its tokenizer")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--queued", type=int, default=100)
    parser.add_argument("--deadline", type=float, default=10.0)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

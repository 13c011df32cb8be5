"""The long form: ``make chaos SECONDS=1800 SEED=7``. Prints what it did; its exit status is 1 when it found a fault."""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.cluster import Cluster
from tests.chaos.history import faults_at_rest
from tests.chaos.load import Load
from tests.chaos.nemesis import FAULTS, Nemesis


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long to go on (default %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults (default %(default)s)")
    parser.add_argument("--streams", type=int, default=32, help="requests at once (default %(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="worker processes (default %(default)s)")
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=sorted(set(FAULTS)), help="kinds (default: all)")
    parser.add_argument("--max-faults", type=int, default=None, help="end after so many (default: by time alone)")
    parser.add_argument("--model", type=Path, default=os.environ.get("QUIRE_TEST_MODEL"), help="for its tokenizer")
    args = parser.parse_args()
    if args.model is None:
        from quire.models import fetch_demo_model

        args.model = fetch_demo_model()
    return asyncio.run(soak(args))


async def soak(args: argparse.Namespace) -> int:
    started = time.monotonic()
    print(f"seed {args.seed}: {args.streams} streams, {args.workers} workers, up to {args.seconds:g} s", flush=True)

    def over(nemesis: Nemesis) -> bool:
        many = args.max_faults is not None and nemesis.done.total() >= args.max_faults
        return many or time.monotonic() - started > args.seconds

    with tempfile.NamedTemporaryFile("w", prefix="quire-chaos-", suffix=".log", delete=False) as log:
        print(f"the processes' logs: {log.name}", flush=True)
        async with Cluster(args.model, args.workers, log) as cluster:
            calm = False
            load = Load(cluster.stub, args.streams, args.seed, enough=lambda load: calm)
            nemesis = Nemesis(cluster, args.seed, load.progress, tuple(args.faults))
            clients = asyncio.create_task(load.run())
            harming = asyncio.create_task(nemesis.run(over))
            while not harming.done():
                await asyncio.wait([harming], timeout=30)
                print(f"{time.monotonic() - started:6.0f} s: {summary(load, nemesis)}", flush=True)
                if load.faults:
                    break
            calm = True
            if not load.faults:
                await harming
            harming.cancel()
            await clients
            faults = load.faults + faults_at_rest(await cluster.at_rest()) + await cluster.router_at_rest()
    print(f"{summary(load, nemesis)}; {len(faults)} faults found", *faults[:20], sep="\n")
    return 1 if faults else 0


def summary(load: Load, nemesis: Nemesis) -> str:
    done = ", ".join(f"{count} x {kind}" for kind, count in sorted(nemesis.done.items()))
    moved = f"{load.moved} moved, {load.moved_with_shape} of them with a grammar"
    return f"{load.done} requests, {load.tokens} tokens; {moved}; {done or 'no harm yet'}"


if __name__ == "__main__":
    sys.exit(main())

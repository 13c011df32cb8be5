"""``quire bench startup``: from the start of ``quire serve`` to ready and to the first token, phase by phase."""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from protos.api_keys import KEY_VARIABLE
from quire.bench.fronts import GrpcFront
from quire.bench.records import Job, Record
from quire.bench.request_flags import not_negative
from quire.bench.servers import Servers
from quire.bench.table import write_json
from quire.config import ServeConfig, parse_args
from quire.models import ModelError, resolve

PROG = "quire bench startup"
RANDOM_WEIGHTS = "random weights"
TOTAL, READY = "total, to the first token", "total, to ready"
_INTERRUPTED = 130
# Where compiled kernels are kept. The router's and gateway's starts have no such caches.
_CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


async def first_token(address: str, model: str) -> None:
    """Returns when a router has sent the first token of a short prompt's output. Raises RuntimeError: it did not."""
    async with GrpcFront(address, model) as front:
        record = Record(time.monotonic())
        await front.run(Job([1, 2, 3, 4], 1), record)
    if record.error:
        raise RuntimeError(f"the server is ready, but its first request failed: {record.detail} ({record.error})")


def measure(flags: Sequence[str], caches: Path) -> dict[str, float]:
    """Seconds of each phase of one start, in order; at last their sums.

    Making random weights is told apart and not in the sums, as reading real ones takes a time of its own.

    Args:
        flags: of ``quire serve``, the model among them.
        caches: folder of compiled kernels; the first start that is given it fills it.

    Raises:
        RuntimeError: it did not become ready.
    """
    # The one request is this benchmark's own; a key that the environment asks for would only keep it out.
    environment = {KEY_VARIABLE: "", **{name: str(caches / name) for name in _CACHES}}
    with Servers(flags, environment) as servers:
        asked = time.monotonic()
        asyncio.run(first_token(servers.grpc, servers.name))
        answered = time.monotonic() - asked
        phases = {f"worker: {name}": seconds for name, seconds in servers.phases().items()}
        tiers = servers.tiers()
    ready = servers.ready - servers.started
    # All start at the same time: what is told of router and gateway is what they take beyond the one before.
    workers = max(seconds for name, seconds in tiers.items() if name.startswith("worker"))
    phases["worker: all else"] = workers - sum(phases.values())
    phases["router, beyond the worker"] = max(0.0, tiers["router"] - workers)
    phases["gateway, beyond both"] = max(0.0, tiers["gateway"] - max(workers, tiers["router"]))
    phases["quire serve itself"] = ready - sum(phases.values())
    made = phases.pop(f"worker: {RANDOM_WEIGHTS}", 0.0)
    sums = {READY: ready - made, "first token": answered, TOTAL: ready - made + answered}
    return {**phases, **sums, **({f"not counted: {RANDOM_WEIGHTS}": made} if made else {})}


def starts_table(starts: Sequence[dict[str, float]]) -> str:
    """The phases of several starts beside each other; the first was cold."""
    names = list(dict.fromkeys(name for start in starts for name in start))
    order = [READY, "first token", TOTAL]
    names.sort(key=lambda name: (name.startswith("not counted"), order.index(name) + 1 if name in order else 0))
    width = max(map(len, names))
    heads = ["cold", *("warm" for _ in starts[1:])]
    lines = [f"{'seconds':{width}}" + "".join(f"{head:>9}" for head in heads)]
    for name in names:
        lines.append(f"{name:{width}}" + "".join(f"{start.get(name, 0.0):9.2f}" for start in starts))
    return "\n".join(lines) + "\n"


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``quire bench startup``; what it does not know is for ``quire serve``."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} [MODEL] [flags] [any flag of quire serve]",
        allow_abbrev=False,
        description="Start `quire serve` again and again on free ports, and say what each phase took until it is ready "
        "and until it has sent a first token. The first start has an empty cache of compiled kernels, later ones what "
        "it left. The file system's cache is as it is found.",
    )
    parser.add_argument(
        "--num-warm-starts", type=not_negative, default=1, metavar="N", help="after the cold one (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def main(argv: list[str]) -> int:
    """Runs the benchmark. Returns 0, 1 when it cannot start, 130 when it was interrupted."""
    args, flags = build_parser().parse_known_args(argv)
    try:
        config = parse_args(flags)
        check_startable(config)
        resolve(config.model)  # fetched now, if need be: that is no part of a start
        starts: list[dict[str, float]] = []
        complete = _measure_all(flags, args.num_warm_starts, starts)
    except (ValueError, ModelError, RuntimeError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    if not complete:
        sys.stdout.write("interrupted: what there is until then\n")
    if starts:
        sys.stdout.write(f"{config.model}\n{starts_table(starts)}")
    if args.json is not None:
        result = {"interrupted": not complete, "starts": starts}
        write_json(args.json, "startup", {"model": config.model, "serve_flags": flags}, result)
    return 0 if complete else _INTERRUPTED


def check_startable(config: ServeConfig) -> None:
    """Raises ValueError for settings of ``quire serve`` that would keep this benchmark's own request out."""
    if config.tls is not None or not {"--api-key", "--api-keys-file"}.isdisjoint(config.gateway_flags):
        raise ValueError("leave out keys and TLS: the server is this benchmark's own")


def _measure_all(flags: Sequence[str], warm: int, starts: list[dict[str, float]]) -> bool:
    """Adds what each start took. Returns whether none was interrupted."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(1 + warm):
                sys.stderr.write(f"{PROG}: {'warm' if number else 'cold'} start\n")
                starts.append(measure(flags, Path(folder)))
    except KeyboardInterrupt:
        return False
    return True

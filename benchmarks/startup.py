"""Cold start (workload C): from the start of ``quire serve`` to the first token, phase by phase.

    python -m benchmarks.startup --model benchmarks/models/llama-3.1-8b [any flag of quire serve]

Twice: with an empty cache of compiled kernels, and with the one that the first start left. A model without weights gets
random ones; making them is told apart and not counted, as reading real ones takes a time of its own. The file system's
cache is as it is found.
"""

import argparse
import asyncio
import re
import tempfile
import time
from pathlib import Path

from benchmarks.serving.records import Job
from benchmarks.serving.servers import NAME, Servers, servable
from benchmarks.serving.streams import GrpcFront

RANDOM_WEIGHTS = "random weights"
CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


async def first_token(address: str) -> None:
    """Returns when the router has sent the first token of a short prompt's output."""
    async with GrpcFront(address, NAME) as front:
        await front.run(Job([1, 2, 3, 4], 1), time.monotonic())


def measure(model: Path, flags: list[str], caches: Path) -> dict[str, float]:
    """Seconds of each phase of one start, in order; the last is their sum."""
    environment = {name: str(caches / name) for name in CACHES}
    with Servers(model, flags, environment) as servers:
        ready = time.monotonic()
        asyncio.run(first_token(servers.grpc))
        total = time.monotonic() - servers.started
        phases = {f"worker: {name}": seconds for name, seconds in servers.phases().items()}
        said = "\n".join(line for _, line in servers.lines)
        tiers = {name: float(seconds) for name, seconds in re.findall(r"\| (\w[\w ]*) ready after ([0-9.]+) s", said)}
    # All start at the same time: what is told of router and gateway is what they take beyond the one before.
    workers = tiers["worker 0"]
    phases["worker: all else"] = workers - sum(phases.values())
    phases |= {"router": tiers["router"] - workers, "gateway": tiers["gateway"] - tiers["router"]}
    phases["first token"] = total - (ready - servers.started)
    phases["quire serve itself"] = total - sum(phases.values())
    made = phases.pop(f"worker: {RANDOM_WEIGHTS}", 0.0)
    return {**phases, "total": total - made, f"not counted: {RANDOM_WEIGHTS}": made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = Path(__file__).parent / "models"
    parser.add_argument("--model", type=Path, default=models / "llama-3.1-8b", help="folder or .gguf file")
    parser.add_argument("--max-model-len", default="8192")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        model, load_format = servable(args.model, Path(folder))
        flags += ["--max-model-len", args.max_model_len, *(["--load-format", load_format] if load_format else [])]
        starts = [measure(model, flags, Path(folder)) for _ in ("cold", "warm")]
    names = [*dict.fromkeys(name for start in starts for name in start)]
    width = max(map(len, names))
    print(f"{'seconds':{width}}  {'cold':>7}  {'warm':>7}")
    for name in sorted(names, key=lambda name: (name.startswith("not counted"), name == "total")):
        print(f"{name:{width}}  " + "  ".join(f"{start.get(name, 0.0):7.2f}" for start in starts))


if __name__ == "__main__":
    main()

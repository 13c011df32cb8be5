"""Divides a machine's processors among workers, by environment variables that each of them is started with."""

import os
from collections.abc import Mapping
from pathlib import Path


class PlacementError(Exception):
    """The machine has too little for that many workers; the message says what to change."""


def place_workers(
    workers: int, device: str, environ: Mapping[str, str], cores: int, gpus: tuple[str, ...], gpus_each: int = 1
) -> list[dict[str, str]]:
    """The environment of each worker, beside the one it inherits.

    Several workers on CPUs get an equal share of the cores each, several on GPUs their own GPUs each. What the
    environment says already is left as it is, and so is everything for a single worker.

    Args:
        workers: how many.
        device: the --device flag.
        environ: the environment that workers inherit.
        cores: cores that this process may use.
        gpus: ids of the GPUs that CUDA would show, as CUDA_VISIBLE_DEVICES spells them.
        gpus_each: how many a worker takes, one for each of its ranks.

    Raises:
        PlacementError: there are GPUs, but fewer than workers.
    """
    if workers == 1:
        return [{}]
    shares = [{} if "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": str(max(1, cores // workers))}] * workers
    if not gpus or device not in ("auto", "cuda"):
        return shares
    if workers * gpus_each > len(gpus):
        raise PlacementError(
            f"--workers is {workers}, but {len(gpus)} GPU(s) are visible and each worker fills {gpus_each}; "
            "lower it, or give --device cpu"
        )
    taken = [gpus[worker * gpus_each : (worker + 1) * gpus_each] for worker in range(workers)]
    return [{**share, "CUDA_VISIBLE_DEVICES": ",".join(ids)} for share, ids in zip(shares, taken, strict=True)]


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Ids of the GPUs that CUDA would show to a child, found without CUDA."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(gpu.strip() for gpu in visible.split(",") if gpu.strip() not in ("", "-1"))
    nodes = [node.name.removeprefix("nvidia") for node in Path("/dev").glob("nvidia[0-9]*")]
    return tuple(str(number) for number in range(len([node for node in nodes if node.isdigit()])))

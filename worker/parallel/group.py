"""The process group of a worker's ranks: NCCL between GPUs, gloo between CPUs."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from worker.parallel.shards import Parallel

# In one step, a rank waits for another one only as long as they differ in speed.
COLLECTIVE_TIMEOUT_S = 30.0


def join_group(store: Path, rank: int, size: int, device: torch.device) -> Parallel:
    """Joins the group; returns when all ranks have.

    Args:
        store: a path in a folder that only this user can enter: the file through which the ranks find each other.
        rank, size: this rank's place.
        device: where its tensors live.
    """
    # All ranks are on this machine: nobody else shall find their ports.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=store.as_uri(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=device if device.type == "cuda" else None,
    )
    return Parallel(rank, size, dist.group.WORLD)


def group_joined() -> bool:
    """Whether this process is in a group; it can be in one at a time."""
    return dist.is_initialized()


def leave_group() -> None:
    """Leaves the group, when it was joined."""
    if group_joined():
        dist.destroy_process_group()

"""``python -m worker.rank LEADER FD``: rank 1 or higher of a worker, started by its leader and by nobody else.

Owns its share of the weights and of every KV block. Does what the leader's plans say and ends with the leader: when the
channel closes, and, on Linux, when the leader's process is gone.
"""

import ctypes
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path

import torch

from protos.logs import log_to_stderr
from worker.assembly import input_builder
from worker.cache_size import fitting_blocks
from worker.config import ConfigError, WorkerConfig
from worker.kv_cache import KVCache
from worker.loader import open_checkpoint
from worker.loader.checkpoint import CheckpointError
from worker.model_config import UnsupportedModel
from worker.model_loading import load_model
from worker.parallel.channel import Channel, ChannelClosed
from worker.parallel.group import join_group
from worker.parallel.plan_wire import PlanUnpacker
from worker.parallel.runners import RankRunner
from worker.setup import resolve

logger = logging.getLogger("worker.rank")

_PR_SET_PDEATHSIG = 1

Inbox = queue.SimpleQueue[bytes]


def main() -> int:
    """Runs until the leader ends it. Returns 1 when this rank cannot go on."""
    leader, descriptor = map(int, sys.argv[1:])
    tie_to_leader(leader)
    # A signal to all of a service's processes is the leader's to obey: it may still finish what runs.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    channel.send_values(up=True)
    start = channel.receive_values()
    rank, size = start["number"], start["size"]
    config = WorkerConfig(**{**start["config"], "model": Path(start["config"]["model"])})
    log_to_stderr(config.log_level, f"worker rank {rank}", config.log_format)
    inbox: Inbox = queue.SimpleQueue()  # bounded by the leader, which is two steps ahead at most
    threading.Thread(target=_read, args=(channel, inbox), name="leader's messages", daemon=True).start()
    try:
        runner = _load(config, Path(start["store"]), rank, size, channel, inbox)
    except (ConfigError, CheckpointError, UnsupportedModel, RuntimeError, MemoryError) as error:
        channel.send_values(error=f"{type(error).__name__}: {error}")
        threading.Event().wait()  # the leader ends this process once it has read why
        raise AssertionError("the reading thread ends the process") from error
    unpacker = PlanUnpacker()
    while True:
        plan = unpacker.unpack(inbox.get())
        try:
            runner.run(plan)
        except RuntimeError as error:
            logger.error("step %d failed: %s", plan.plan.number, error)
            return 1


def tie_to_leader(leader: int) -> None:
    """Makes the kernel end this process when the leader's ends, where it can. Exits when the leader is gone already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != leader:
        sys.exit(1)


def _load(config: WorkerConfig, store: Path, rank: int, size: int, channel: Channel, inbox: Inbox) -> RankRunner:
    checkpoint = open_checkpoint(config.model)
    setup = resolve(config, checkpoint)
    device, dtype = setup.device, setup.dtype
    if device.type == "cuda":
        torch.cuda.set_device(device)
    parallel = join_group(store, rank, size, device)
    model, _ = load_model(config, checkpoint, setup.max_model_len, dtype, device, parallel)
    fitting, _ = fitting_blocks(setup, model, checkpoint.config, parallel)
    channel.send_values(num_blocks=fitting)
    num_blocks = json.loads(inbox.get())["num_blocks"]
    cache = KVCache(checkpoint.config, num_blocks, config.block_size, setup.kv_cache_dtype, device, parallel)
    channel.send_values(ready=True)
    return RankRunner(model, cache, input_builder(setup, cache, device), parallel)


def _read(channel: Channel, inbox: Inbox) -> None:
    """Takes in the leader's messages, and ends the process with the channel, whatever it is doing."""
    try:
        while True:
            inbox.put(channel.receive())
    except ChannelClosed:
        os._exit(0)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # whatever it is, the leader must see this process end
        logger.exception("this rank failed")
        status = 1
    logging.shutdown()
    os._exit(status)  # the group's own threads may be waiting for ranks that are gone

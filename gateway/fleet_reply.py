"""The workers and who waits for them, as JSON."""

from pydantic import BaseModel

from protos import inference_pb2


class KvBlocks(BaseModel):
    """Blocks of KV cache: total is used, cached and free together; cached ones are free when needed."""

    total: int
    used: int
    cached: int
    free: int


class WorkerReply(BaseModel):
    """One worker. Its figures are 0 while it is away.

    ``prefix_cache_queries`` are prompt tokens of the sequences that began to run, ``prefix_cache_hits`` those of them
    that were cached.
    """

    address: str
    name: str
    ready: bool
    running: int
    waiting: int
    kv_blocks: KvBlocks
    block_size: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    backlog_tokens: int


class FleetReply(BaseModel):
    """The reply of GET /fleet. ``waiting`` requests are in the router, those of a worker have been given to it."""

    waiting: int
    workers: list[WorkerReply]


def fleet_reply(load: inference_pb2.GetLoadResponse) -> FleetReply:
    """The reply to what the router says of its load."""
    return FleetReply(waiting=load.waiting, workers=[_worker(worker) for worker in load.workers])


def _worker(worker: inference_pb2.GetLoadResponse.Worker) -> WorkerReply:
    return WorkerReply(
        address=worker.address,
        name=worker.name,
        ready=worker.ready,
        running=worker.running,
        waiting=worker.waiting,
        kv_blocks=KvBlocks(
            total=worker.total_blocks, used=worker.used_blocks, cached=worker.cached_blocks, free=worker.free_blocks
        ),
        block_size=worker.block_size,
        prefix_cache_queries=worker.prefix_cache_queries,
        prefix_cache_hits=worker.prefix_cache_hits,
        preemptions=worker.preemptions,
        backlog_tokens=worker.backlog_tokens,
    )

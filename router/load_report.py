"""What GetLoad answers, and what the router's metrics are made of: who waits, and what each worker is busy with."""

from protos import inference_pb2
from router.admission import WaitingQueue
from router.fleet import Fleet
from router.fleet_view import FleetView
from router.routing.worker_view import WorkerView
from router.worker_link import WorkerLink


class LoadReporter:
    """Reads, and changes nothing.

    Args:
        fleet, view, queue: the router's.
    """

    def __init__(self, fleet: Fleet, view: FleetView, queue: WaitingQueue) -> None:
        self._fleet = fleet
        self._view = view
        self._queue = queue

    def report(self) -> inference_pb2.GetLoadResponse:
        """The load of this moment. May be called from any thread: it reads only what is safe to while others write."""
        counted = self._view.predictions
        return inference_pb2.GetLoadResponse(
            waiting=len(self._queue),
            workers=[_worker(link, self._view.view(link)) for link in tuple(self._fleet.links)],
            predictions=inference_pb2.GetLoadResponse.Predictions(
                sequences=counted.sequences,
                predicted_tokens=counted.predicted_tokens,
                cached_tokens=counted.cached_tokens,
                missed_tokens=counted.missed_tokens,
                unexpected_tokens=counted.unexpected_tokens,
            ),
        )


def _worker(link: WorkerLink, view: WorkerView | None) -> inference_pb2.GetLoadResponse.Worker:
    worker = inference_pb2.GetLoadResponse.Worker(address=link.address, name=link.name)
    if view is None:
        return worker
    load, slots = view.load, link.slots
    worker.ready = link.ready
    worker.running, worker.waiting = load.running, load.waiting
    worker.slots_taken, worker.max_slots = slots.running, slots.size
    worker.total_blocks, worker.block_size = view.num_blocks, view.block_size
    worker.cached_blocks, worker.free_blocks = load.cached_blocks, load.free_blocks
    worker.used_blocks = max(0, view.num_blocks - load.cached_blocks - load.free_blocks)
    worker.prefix_cache_queries, worker.prefix_cache_hits = view.prefix_cache_queries, view.prefix_cache_hits
    worker.preemptions = load.num_preemptions
    worker.backlog_tokens = view.backlog
    worker.prefill_tokens_per_second = view.prefill_rate
    if link.hello is not None:
        worker.start_seconds.update(link.hello.start_seconds)
    worker.draft_tokens, worker.accepted_tokens = load.draft_tokens, load.accepted_tokens
    return worker

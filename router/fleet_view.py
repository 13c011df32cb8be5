"""Keeps what routing knows of the workers in step with their links' messages."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from protos import sampling_pb2, worker_pb2
from router.events import RouterEvents
from router.routing.cache_mirror import CacheMirror
from router.routing.dispatcher import Dispatcher
from router.routing.predictions import PredictionCounters
from router.routing.prefix_index import PrefixIndex
from router.routing.tenant_counters import TenantCounters
from router.routing.throughput import Throughput
from router.routing.worker_view import Placed, WorkerView, level_rates
from router.worker_link import WorkerLink

# Until a worker has said how long its blocks are.
_DEFAULT_BLOCK_SIZE = 16
# Ends of outputs that are as long as they were to be.
_WHOLE = (sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH)


@dataclass(slots=True)
class _Taken:
    """What is in a slot."""

    generation: int
    placed: Placed
    tenant: str
    # Output tokens that were generated elsewhere before, and all that the tenant was charged for.
    output_before: int
    charged: int


@dataclass(slots=True)
class _Lane:
    """One link's worker and slots."""

    view: WorkerView
    taken: dict[int, _Taken] = field(default_factory=dict)
    # Slots whose sequences have no token yet.
    prefilling: set[int] = field(default_factory=set)


class FleetView:
    """All links that are up, as the dispatcher sees them.

    Args:
        index: filled with what the workers have cached.
        dispatcher: its ``views`` are kept.
        counters: tenants are charged for what their sequences generate.
        events: are counted.

    Attributes:
        block_size: tokens a block, the same for all workers that are routed to by prefix.
        predictions: how well it was foretold what is cached.
    """

    def __init__(
        self, index: PrefixIndex, dispatcher: Dispatcher, counters: TenantCounters, events: RouterEvents
    ) -> None:
        self._index = index
        self._dispatcher = dispatcher
        self._counters = counters
        self._events = events
        self._lanes: dict[WorkerLink, _Lane] = {}
        self._links: dict[int, WorkerLink] = {}
        self.block_size = _DEFAULT_BLOCK_SIZE
        self.predictions = PredictionCounters()

    def view(self, link: WorkerLink) -> WorkerView | None:
        """What is known of a link's worker; None while it is not up."""
        lane = self._lanes.get(link)
        return lane.view if lane is not None else None

    def link(self, view: WorkerView) -> WorkerLink:
        """The link of a worker."""
        return self._links[view.number]

    def join(self, link: WorkerLink, now: float) -> None:
        """A link is up."""
        hello = link.hello
        assert hello is not None
        if not self._lanes and hello.block_size:
            self.block_size = hello.block_size
        # Names of blocks of another length are other names: such a worker is never asked what it has cached.
        caches = hello.enable_prefix_caching and hello.block_size == self.block_size
        number = next(number for number in range(len(self._links) + 1) if number not in self._links)
        cache = CacheMirror(self._index, number, hello.num_blocks if caches else 0, hello.epoch)
        view = WorkerView(link.address, number, hello, cache, Throughput(hello.max_num_batched_tokens))
        self._lanes[link] = _Lane(view)
        self._links[number] = link
        self._dispatcher.views.append(view)
        level_rates(self._dispatcher.views)
        self._follow(link, view, now)

    def leave(self, link: WorkerLink) -> None:
        """A link is down: what its worker had is gone."""
        lane = self._lanes.pop(link, None)
        if lane is not None:
            del self._links[lane.view.number]
            self._dispatcher.views.remove(lane.view)
            lane.view.cache.void()

    def refresh(self) -> None:
        """Looks which workers take sequences now."""
        for link, lane in self._lanes.items():
            lane.view.accepting = link.accepting
            lane.view.open = lane.view.accepting and link.has_place

    def took(self, link: WorkerLink, slot: int, generation: int, placed: Placed, tenant: str, output: int) -> None:
        """A sequence, of which ``output`` tokens were generated elsewhere before, went into a slot."""
        lane = self._lanes[link]
        lane.taken[slot] = _Taken(generation, placed, tenant, output, output)
        lane.prefilling.add(slot)

    def progress(self, link: WorkerLink, batch: worker_pb2.StepBatch, now: float) -> None:
        """Takes in a StepBatch, before its rows change anything else."""
        lane = self._lanes.get(link)
        if lane is None:
            return
        view = lane.view
        for admitted in batch.admitted:
            taken = lane.taken.get(admitted.slot)
            if taken is not None and taken.generation == admitted.generation:
                self.predictions.observe(taken.placed.predicted_tokens, admitted.cached_tokens)
                view.admit(taken.placed, admitted.cached_tokens, now)
        if lane.prefilling:
            for slot in lane.prefilling.intersection(batch.slots):
                lane.prefilling.discard(slot)
                taken = lane.taken[slot]
                view.begin_decode(taken.placed, now)
                if not taken.output_before:
                    self._events.time_to_first_token.observe(now - taken.placed.queued_at)
        for row in batch.finished:
            taken = lane.taken.get(row.slot)
            if taken is not None and taken.generation == row.generation:
                self._charge(taken, row.usage.completion_tokens)
                if row.reason in _WHOLE:
                    self._dispatcher.output_lengths.ended(row.usage.completion_tokens)
                self._leave_slot(lane, row.slot, now)
        if batch.HasField("load"):
            was_measured = view.throughput.measured
            view.report(batch.step, batch.load)
            if not was_measured and view.throughput.measured:
                level_rates(self._dispatcher.views)

    def heard(self, link: WorkerLink, pong: worker_pb2.Pong, now: float) -> None:
        """Takes in a Pong."""
        lane = self._lanes.get(link)
        if lane is not None:
            if pong.HasField("load"):
                lane.view.report(pong.step, pong.load)
            level_rates(self._dispatcher.views)
            self._follow(link, lane.view, now)

    def told(self, link: WorkerLink, events: worker_pb2.KvEvents, now: float) -> None:
        """Takes in KvEvents."""
        lane = self._lanes.get(link)
        if lane is not None:
            lane.view.cache.apply(events, now)
            self._follow(link, lane.view, now)

    def refused(self, link: WorkerLink, slot: int, generation: int, now: float) -> None:
        """The worker did not take what was put into a slot: nothing was served."""
        lane = self._lanes.get(link)
        taken = lane.taken.get(slot) if lane is not None else None
        if lane is not None and taken is not None and taken.generation == generation:
            cached = taken.placed.predicted_tokens
            self._counters.charge(taken.tenant, missing=cached - taken.placed.prompt_tokens, cached=-cached)
            self._leave_slot(lane, slot, now)

    def charge_output(self) -> None:
        """Charges tenants for what their running sequences have generated so far, and looks when one might end."""
        lengths = self._dispatcher.output_lengths
        for link, lane in self._lanes.items():
            lane.view.next_end_steps = lengths.until_next_end(
                [(len(choice.token_ids), choice.request.max_tokens) for choice in link.slots.choices()]
            )
            for choice in link.slots.choices():
                taken = lane.taken.get(choice.slot)
                if taken is not None:
                    self._charge(taken, len(choice.token_ids))

    def views(self) -> Iterable[tuple[WorkerLink, WorkerView]]:
        """All links that are up, with their workers."""
        return ((link, lane.view) for link, lane in self._lanes.items())

    def _charge(self, taken: _Taken, output: int) -> None:
        if output > taken.charged:
            self._counters.charge(taken.tenant, output=output - taken.charged)
            taken.charged = output

    @staticmethod
    def _leave_slot(lane: _Lane, slot: int, now: float) -> None:
        lane.prefilling.discard(slot)
        lane.view.end(lane.taken.pop(slot).placed, now)

    @staticmethod
    def _follow(link: WorkerLink, view: WorkerView, now: float) -> None:
        """Asks for the worker's names whenever what is known of them cannot be trusted."""
        if view.cache.ask(now):
            link.subscribe()

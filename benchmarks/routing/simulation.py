"""Runs jobs through a router and virtual workers, event by event."""

import heapq
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from benchmarks.routing.peer_rules import RULES, Rule
from benchmarks.routing.virtual_worker import Job, Speed, VirtualWorker
from protos import worker_pb2
from router.routing.cache_mirror import CacheMirror
from router.routing.dispatcher import Dispatcher
from router.routing.fair_queue import FairQueue
from router.routing.policies import POLICIES
from router.routing.prefix_index import PrefixIndex
from router.routing.tenant_counters import TenantCounters
from router.routing.throughput import Throughput
from router.routing.waiting import Waiting
from router.routing.worker_view import WorkerView, level_rates


class VirtualRouter(Protocol):
    """Gets jobs to workers."""

    def arrive(self, job: Job, now: float) -> None:
        """A job arrives."""

    def progress(
        self, worker: VirtualWorker, admitted: list[Job], first: list[Job], ended: list[Job], now: float
    ) -> None:
        """A worker's steps ended."""

    def died(self, worker: VirtualWorker, lost: list[Job], now: float) -> None:
        """A worker is gone; what it had must run elsewhere."""


class PeerRouter:
    """Binds each job at arrival by a rule."""

    def __init__(self, rule: Rule, workers: Sequence[VirtualWorker]) -> None:
        self._rule = rule
        self._workers = workers

    def arrive(self, job: Job, now: float) -> None:
        self._rule.choose(job, [worker for worker in self._workers if worker.alive]).submit(job, now)

    def progress(
        self, worker: VirtualWorker, admitted: list[Job], first: list[Job], ended: list[Job], now: float
    ) -> None:
        pass

    def died(self, worker: VirtualWorker, lost: list[Job], now: float) -> None:
        for job in lost:
            self.arrive(job, now)


class OwnRouter:
    """The project's own routing, fed as the router feeds it.

    Args:
        policy: a name from POLICIES.
        workers: the fleet.
        events: whether workers tell what they cache.
    """

    def __init__(self, policy: str, workers: Sequence[VirtualWorker], *, events: bool = True) -> None:
        index = PrefixIndex()
        self.queue = FairQueue(TenantCounters())
        self._dispatcher = Dispatcher(index, self.queue, POLICIES[policy]())
        self._workers = workers
        self._events = events
        self._sequences = [0] * len(workers)
        self._jobs: dict[Waiting, Job] = {}
        for worker in workers:
            hello = worker_pb2.Hello(
                block_size=worker.block_size,
                num_blocks=worker.num_blocks,
                max_slots=320,
                max_num_batched_tokens=worker.speed.budget,
            )
            cache = CacheMirror(index, worker.number, worker.num_blocks, 0)
            if events:
                cache.apply(worker_pb2.KvEvents(sequence=1, snapshot=True, cleared=True), 0.0)
                self._sequences[worker.number] = 1
            speed = Throughput(worker.speed.budget)
            self._dispatcher.views.append(WorkerView(f"worker {worker.number}", worker.number, hello, cache, speed))

    def arrive(self, job: Job, now: float) -> None:
        block_size = self._workers[0].block_size
        affinity = job.names[0] if job.names else b""
        entry = Waiting(job.names, job.prompt_tokens, now, block_size, tenant=job.tenant, affinity=affinity)
        self._jobs[entry] = job
        self._dispatcher.add(entry)
        self._dispatch(now)

    def progress(
        self, worker: VirtualWorker, admitted: list[Job], first: list[Job], ended: list[Job], now: float
    ) -> None:
        view = self._dispatcher.views[worker.number]
        for job in admitted:
            view.admit(job.route, job.cached_tokens, now)
        for job in first:
            view.begin_decode(job.route, now)
        for job in ended:
            view.end(job.route, now)
            self.queue.counters.charge(job.tenant, output=job.output_tokens)
        load = worker_pb2.Load(
            queued_prefill_tokens=worker.queued_prefill_tokens,
            free_blocks=worker.available_blocks,
            prefill_tokens=worker.prefill_tokens,
            busy_us=int(worker.busy_s * 1e6),
        )
        view.report(worker.step, load)
        level_rates(self._dispatcher.views)
        if self._events and (worker.stored or worker.removed):
            self._sequences[worker.number] += 1
            view.cache.apply(
                worker_pb2.KvEvents(
                    sequence=self._sequences[worker.number],
                    removed=b"".join(worker.removed),
                    stored=b"".join(worker.stored),
                ),
                now,
            )
        worker.stored.clear()
        worker.removed.clear()
        self._dispatch(now)

    def died(self, worker: VirtualWorker, lost: list[Job], now: float) -> None:
        view = self._dispatcher.views[worker.number]
        view.accepting = False
        view.cache.void()
        for job in lost:
            self.arrive(job, now)

    def _dispatch(self, now: float) -> None:
        for entry, view, placed in self._dispatcher.dispatch(now).placed:
            job = self._jobs.pop(entry)
            job.route = placed
            self._workers[view.number].submit(job, now)


@dataclass
class Outcome:
    """What a run came to."""

    ttft_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    end_s: float = 0.0

    @property
    def mean(self) -> float:
        """Mean time to the first token, in seconds."""
        return statistics.fmean(self.ttft_s)

    def quantile(self, share: float) -> float:
        """The time that this share of requests had their first token within."""
        return sorted(self.ttft_s)[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))]

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens


class Agenda:
    """What happens when, in virtual time."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Job | VirtualWorker | None, int]] = []
        self._tick = itertools.count()

    def schedule(self, at: float, what: Job | VirtualWorker | None, number: int = 0) -> None:
        """A job arrives, a worker's event numbered ``number`` comes, or (None) worker 0 dies."""
        heapq.heappush(self._events, (at, next(self._tick), what, number))

    def play(self, route: VirtualRouter, workers: Sequence[VirtualWorker], until: float = math.inf) -> float:
        """Lets all of it happen, and what follows from it, or all before a point of time. Returns the last event's."""
        now = 0.0
        while self._events and self._events[0][0] <= until:
            now, _, what, number = heapq.heappop(self._events)
            if isinstance(what, Job):
                route.arrive(what, now)
            elif isinstance(what, VirtualWorker):
                done = what.on_event(number, now)
                if done is not None:
                    route.progress(what, *done, now)
            else:
                route.died(workers[0], workers[0].die(), now)
        return now


def simulate(
    jobs: Sequence[Job], speeds: Sequence[Speed], block_size: int, router: str, seed: int, death_s: float | None = None
) -> Outcome:
    """Runs jobs, which are left as they are.

    Args:
        jobs: in order of arrival.
        speeds: of each worker.
        block_size: tokens a block.
        router: a rule's name, or ours: a policy's, after ``own ``; ``own prefix, no events`` leaves the events out.
        seed: for rules that draw lots.
        death_s: when worker 0 dies, if it does.
    """
    agenda = Agenda()
    workers = [VirtualWorker(number, speed, block_size, agenda.schedule) for number, speed in enumerate(speeds)]
    route: VirtualRouter
    if router.startswith("own "):
        policy, _, rest = router.removeprefix("own ").partition(", ")
        route = OwnRouter(policy, workers, events=rest != "no events")
    else:
        route = PeerRouter(next(rule for rule in RULES if rule.name == router)(seed), workers)
    running = [replace(job) for job in jobs]
    for job in running:
        agenda.schedule(job.arrival_s, job)
    if death_s is not None:
        agenda.schedule(death_s, None)
    outcome = Outcome(end_s=agenda.play(route, workers))
    for job in running:
        assert job.end_s is not None, f"a job never ended under {router}"
        assert job.first_s is not None
        outcome.ttft_s.append(job.first_s - job.arrival_s)
        outcome.cached_tokens += job.cached_tokens
        outcome.prompt_tokens += job.prompt_tokens
    return outcome

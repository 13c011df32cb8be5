"""Two tenants who both send more than their share, one ten times as much as the other: who is served how much.

    python -m benchmarks.routing.fairness

Eight virtual workers run the router's own queue and dispatcher (simulation.py). The gap is that between the tenants'
virtual tokens while both have requests waiting, and is compared with the published bound: QUANTUM, the cost of one
request, and what running sequences have generated and is not charged yet. Throughput is compared with the same requests
sent by one tenant: then the queue is in the order of least work with ageing alone.
"""

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.routing.simulation import Agenda, OwnRouter
from benchmarks.routing.virtual_worker import Job, Speed, VirtualWorker
from benchmarks.routing.workloads import name_of
from router.routing.dispatcher import QUANTUM
from router.routing.virtual_counters import cost

WORKERS, BLOCK = 8, 100
FEW, MANY = "few", "many"
# Seconds between two looks at what running sequences have generated, as in the router.
CHARGE_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Served:
    """What was served until the end of a run.

    Attributes:
        gap, bound: the largest gap between the tenants, and what it may have been, in virtual tokens.
        share: of the tenant with fewer requests, of all virtual tokens, while both had requests waiting.
        tokens: prompt tokens that were computed or cached, and output tokens.
        backlogged_s: seconds in which both had requests waiting.
    """

    gap: float
    bound: float
    share: float
    tokens: int
    backlogged_s: float


class WatchedRouter(OwnRouter):
    """Charges for output as the router does, while it is generated, and looks at the tenants' counters."""

    def __init__(self, workers: list[VirtualWorker], longest: float) -> None:
        super().__init__("prefix", workers)
        self._longest = longest
        self._charged: dict[int, int] = {}
        self._charged_at = 0.0
        self._begun_at: float | None = None
        self._start = {FEW: 0.0, MANY: 0.0}
        self.gap = self.bound = self.share = self.backlogged_s = 0.0
        self.output_tokens = self.cached_tokens = 0

    @property
    def tokens(self) -> int:
        """Prompt tokens that were computed or cached, and output tokens."""
        generated = sum(
            job.output_tokens - (end - worker.step) for worker in self._workers for end, _, job in worker.decoding
        )
        computed = sum(worker.prefill_tokens for worker in self._workers)
        return computed + self.cached_tokens + self.output_tokens + generated

    def progress(
        self, worker: VirtualWorker, admitted: list[Job], first: list[Job], ended: list[Job], now: float
    ) -> None:
        self.cached_tokens += sum(job.cached_tokens for job in admitted)
        for job in ended:
            self.output_tokens += job.output_tokens
            # What ``super`` charges for it, this has charged in part.
            self.queue.counters.charge(job.tenant, output=-self._charged.pop(id(job), 0))
        if now - self._charged_at >= CHARGE_INTERVAL_S:
            self._charged_at = now
            for other in self._workers:
                for end, _, job in other.decoding:
                    generated = job.output_tokens - (end - other.step)
                    self.queue.counters.charge(job.tenant, output=generated - self._charged.get(id(job), 0))
                    self._charged[id(job)] = generated
        super().progress(worker, admitted, first, ended, now)
        self._look(now)

    def _look(self, now: float) -> None:
        if not {FEW, MANY} <= self.queue.accounts:
            return
        served = {tenant: self.queue.counters.of_account(tenant) for tenant in (FEW, MANY)}
        if self._begun_at is None:
            self._begun_at, self._start = now, served
        gap = abs(served[FEW] - served[MANY])
        uncharged = sum(
            cost(output=job.output_tokens - (end - other.step) - self._charged.get(id(job), 0))
            for other in self._workers
            for end, _, job in other.decoding
        )
        bound = QUANTUM + self._longest + uncharged
        if gap / bound > self.gap / (self.bound or 1.0):
            self.gap, self.bound = gap, bound
        self.backlogged_s = now - self._begun_at
        few, many = (served[tenant] - self._start[tenant] for tenant in (FEW, MANY))
        self.share = few / (few + many) if few + many else 0.0


def run(jobs: list[Job], seconds: float) -> Served:
    """Sends jobs for some time, and looks what was served in that time."""
    agenda = Agenda()
    speed = Speed(cache_tokens=300_000)
    workers = [VirtualWorker(number, speed, BLOCK, agenda.schedule) for number in range(WORKERS)]
    route = WatchedRouter(workers, max(cost(missing=job.prompt_tokens) for job in jobs))
    for job in jobs:
        agenda.schedule(job.arrival_s, replace(job))
    agenda.play(route, workers, seconds)
    return Served(route.gap, route.bound, route.share, route.tokens, route.backlogged_s)


def arrivals(rate: float, seconds: float, seed: int, groups: int) -> list[Job]:
    """Requests of both tenants, of whom one sends a tenth of what the other does; every kind of length.

    Args:
        rate: requests a second of the tenant that sends fewer.
        seconds: how long.
        seed: of all that is drawn.
        groups: prefixes that a tenant's requests share; 0: none.
    """
    chance = random.Random(seed)
    jobs = []
    for tenant, times in ((FEW, 1), (MANY, 10)):
        now = 0.0
        while (now := now + chance.expovariate(rate * times)) < seconds:
            tokens = min(int(chance.lognormvariate(7, 1)), 16_000) + (2000 if groups else 1)
            group = chance.randrange(groups) if groups else -1
            names = [
                name_of(tenant, group, place) if groups and place < 2000 // BLOCK else name_of(tenant, now, place)
                for place in range(tokens // BLOCK)
            ]
            jobs.append(Job(now, tokens, max(1, min(int(chance.lognormvariate(5, 0.8)), 1000)), names, tenant))
    return sorted(jobs, key=lambda job: job.arrival_s)


def main() -> None:
    """Parses the flags and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    print(f"{'requests':28} {'gap':>8} {'of bound':>8} {'share':>6}   throughput / without tenants (range)")
    kinds: dict[str, Callable[[int], list[Job]]] = {
        "nothing in common, 35/s": lambda seed: arrivals(35, given.seconds, seed, 0),
        "20 prefixes a tenant, 35/s": lambda seed: arrivals(35, given.seconds, seed, 20),
    }
    for name, make in kinds.items():
        fair, ratios = [], []
        for seed in range(given.seeds):
            jobs = make(seed)
            fair.append(run(jobs, given.seconds))
            plain = run([replace(job, tenant=MANY) for job in jobs], given.seconds)
            ratios.append(fair[-1].tokens / plain.tokens)
        assert all(one.backlogged_s > 0.8 * given.seconds for one in fair), "the tenants did not send enough"
        gap = max(fair, key=lambda one: one.gap / one.bound)
        share = statistics.median(one.share for one in fair)
        print(f"{name:28} {gap.gap:8.0f} {gap.gap / gap.bound:8.2f} {share:6.3f}   "
              f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

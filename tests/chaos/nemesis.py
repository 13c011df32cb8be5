"""Does harm to a cluster, by a schedule that a seed decides: to one worker, or to all in the same moment."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import grpc

from router.recovery import UNSEEN_TOKENS
from tests.chaos.cluster import Cluster, WorkerProcess

_MENDED_S = 60.0
# Those of all workers at once; while one is under way, nothing else is.
FLEET_FAULTS = ("kill-all", "cut-all")
FAULTS = ("kill", "kill", "kill", "kill", "pause", "end", "cut", "delay", *FLEET_FAULTS)
# Never held against a request, however often they come before its output has advanced.
_BLAMELESS = ("cut", "cut-all")


class Nemesis:
    """Harms workers and mends them after a while. Apart from the faults of all, one worker is always left alone.

    Args:
        cluster: at least two workers.
        seed: of the schedule.
        faults: kinds to choose from; one named more often comes more often.
        pause_s: shortest and longest time between two faults.
        progress: tokens that have come of each choice of the running requests. Attempts at a request are bounded, and
            what two workers die of one after the other is quarantined, unless its output has advanced between: so
            each has some steps between two faults, however slow the machine is. Cut connections do not wait for that.

    Attributes:
        done: faults so far, by kind.
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        progress: Callable[[], Mapping[tuple[str, int], int]],
        faults: tuple[str, ...] = FAULTS,
        pause_s: tuple[float, float] = (1.0, 2.5),
    ) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._progress = progress
        self._faults = faults
        self._pause_s = pause_s
        self._harmed: set[int] = set()
        # What had come of the requests that ran at the last fault.
        self._before: dict[tuple[str, int], int] = {}
        self.done: Counter[str] = Counter()

    async def run(self, enough: Callable[["Nemesis"], bool]) -> None:
        """Harms until it is enough, and returns when all is mended."""
        rng = self._rng
        async with asyncio.TaskGroup() as group:
            while not enough(self):
                # All decisions are drawn before anything is waited for: a seed stands for one schedule.
                kind = rng.choice(self._faults)
                number = rng.randrange(len(self._cluster.workers))
                pause, length = rng.uniform(*self._pause_s), rng.random()
                await asyncio.sleep(pause)
                if kind not in _BLAMELESS:
                    await self._until_all_advanced()
                await self._until_ready(len(self._cluster.workers) if kind in FLEET_FAULTS else 2)
                healthy = [worker for worker in self._cluster.workers if worker.number not in self._harmed]
                chosen = healthy if kind in FLEET_FAULTS else [healthy[number % len(healthy)]]
                numbers = {worker.number for worker in chosen}
                self._harmed |= numbers
                self.done[kind] += 1
                self._before = dict(self._progress())
                group.create_task(self._harm(kind, chosen, length), name=f"{kind} {numbers}")
        await self._cluster.until_ready(len(self._cluster.workers))

    async def _until_all_advanced(self) -> None:
        """Waits until what ran at the last fault has ended, or has come further than a crash could be blamed on it."""
        async with asyncio.timeout(_MENDED_S):
            while True:
                now = self._progress()
                if all(now.get(key, count + UNSEEN_TOKENS + 1) > count + UNSEEN_TOKENS
                       for key, count in self._before.items()):  # fmt: skip
                    return
                await asyncio.sleep(0.02)

    async def _until_ready(self, count: int) -> None:
        """Waits until the router has so many workers that are not being harmed."""
        while True:
            for worker in self._cluster.workers:
                if worker.number not in self._harmed:
                    assert worker.status is None, f"worker {worker.number} ended by itself, status {worker.status}"
            mended = len(self._cluster.workers) - len(self._harmed)
            if mended >= count and await self._cluster.ready_workers() >= count:
                return
            await asyncio.sleep(0.05)

    async def _harm(self, kind: str, workers: Sequence[WorkerProcess], length: float) -> None:
        async with asyncio.timeout(_MENDED_S):  # a fault that is never mended would look like peace
            await self._harm_and_mend(kind, workers, length)
        self._harmed -= {worker.number for worker in workers}

    async def _harm_and_mend(self, kind: str, workers: Sequence[WorkerProcess], length: float) -> None:
        worker = workers[0]
        match kind:
            case "kill" | "kill-all":
                await asyncio.gather(*(worker.kill() for worker in workers))
                await asyncio.sleep(length)
                for worker in workers:
                    worker.start()
            case "end":
                status = await worker.end()
                assert status == 0, f"worker {worker.number} ended with status {status} when it was asked to end"
                worker.start()
            case "pause":
                worker.pause()
                await asyncio.sleep(0.2 + 8 * length)
                worker.resume()
            case "cut" | "cut-all":
                for worker in workers:
                    worker.proxy.cut()
            case "delay":
                worker.proxy.delay = 0.02 + 0.1 * length
                await asyncio.sleep(2 * length)
                worker.proxy.delay = 0.0
        if kind in ("kill", "kill-all", "end"):
            await asyncio.gather(*(self._until_back(worker) for worker in workers))

    @staticmethod
    async def _until_back(worker: WorkerProcess) -> None:
        """Waits until the new process serves."""
        while True:
            try:
                await worker.at_rest()
                return
            except grpc.aio.AioRpcError:  # nobody listens yet, or the engine is not there
                await asyncio.sleep(0.1)

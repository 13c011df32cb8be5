"""Does harm to a cluster, by a schedule that a seed decides. At least one worker is always left alone."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping

import grpc

from router.recovery import UNSEEN_TOKENS
from tests.chaos.cluster import Cluster, WorkerProcess

_MENDED_S = 60.0
FAULTS = ("kill", "kill", "kill", "kill", "pause", "end", "cut", "delay")


class Nemesis:
    """Harms one worker at a time and mends it after a while.

    Args:
        cluster: at least two workers.
        seed: of the schedule.
        faults: kinds to choose from; one named more often comes more often.
        pause_s: shortest and longest time between two faults.
        progress: tokens that have come of each choice of the running requests. What two workers in a row die of is
            quarantined, unless its output has advanced between: so each has some steps between two faults, however
            slow the machine is.

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
                await self._until_all_advanced()
                await self._until_another_works()
                healthy = [worker for worker in self._cluster.workers if worker.number not in self._harmed]
                worker = healthy[number % len(healthy)]
                self._harmed.add(worker.number)
                self.done[kind] += 1
                self._before = dict(self._progress())
                group.create_task(self._harm(kind, worker, length), name=f"{kind} worker {worker.number}")
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

    async def _until_another_works(self) -> None:
        """Waits until the router has two workers that are not being harmed."""
        while True:
            for worker in self._cluster.workers:
                if worker.number not in self._harmed:
                    assert worker.status is None, f"worker {worker.number} ended by itself, status {worker.status}"
            mended = len(self._cluster.workers) - len(self._harmed)
            if mended >= 2 and await self._cluster.ready_workers() >= 2:
                return
            await asyncio.sleep(0.05)

    async def _harm(self, kind: str, worker: WorkerProcess, length: float) -> None:
        async with asyncio.timeout(_MENDED_S):  # a fault that is never mended would look like peace
            await self._harm_and_mend(kind, worker, length)
        self._harmed.discard(worker.number)

    async def _harm_and_mend(self, kind: str, worker: WorkerProcess, length: float) -> None:
        match kind:
            case "kill":
                await worker.kill()
                await asyncio.sleep(length)
                worker.start()
            case "end":
                status = await worker.end()
                assert status == 0, f"worker {worker.number} ended with status {status} when it was asked to end"
                worker.start()
            case "pause":
                worker.pause()
                await asyncio.sleep(0.2 + 8 * length)
                worker.resume()
            case "cut":
                worker.proxy.cut()
            case "delay":
                worker.proxy.delay = 0.02 + 0.1 * length
                await asyncio.sleep(2 * length)
                worker.proxy.delay = 0.0
        if kind in ("kill", "end"):
            await self._until_back(worker)

    @staticmethod
    async def _until_back(worker: WorkerProcess) -> None:
        """Waits until the new process serves."""
        while True:
            try:
                await worker.at_rest()
                return
            except grpc.aio.AioRpcError:  # nobody listens yet, or the engine is not there
                await asyncio.sleep(0.1)

"""The processes of one server as a whole: started, watched, ended in the reverse order of who uses whom."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from quire.child import Child, describe_status
from quire.console import Console
from quire.plan import ProcessPlan

# What a process may take to leave after the time it gives to running requests.
_LEAVE_S = 5.0


class StackError(Exception):
    """The server cannot go on. ``last_lines`` are those of the process that is to blame."""

    def __init__(self, message: str, last_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.last_lines = tuple(last_lines)


class Stack:
    """Starts tiers of processes and owns them: a process that ends before ``stop`` is a failure of the whole."""

    def __init__(self, console: Console, shutdown_timeout: float) -> None:
        self._console = console
        self._grace = shutdown_timeout + _LEAVE_S
        self._tiers: list[list[Child]] = []
        self._ready: set[Child] = set()

    async def start_together(self, *tiers: Coroutine[Any, Any, None]) -> None:
        """Runs several ``start``, in the order of what is used by what, at the same time.

        Raises:
            StackError: the first of theirs; the others are given up.
        """
        tasks = [asyncio.create_task(tier) for tier in tiers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def start(
        self, plans: Sequence[ProcessPlan], ready: Sequence[Coroutine[Any, Any, None]], limit_s: float
    ) -> None:
        """Starts a tier and returns when all of ``ready``, one a process, have returned.

        Raises:
            StackError: a process ended, or the tier was not ready within ``limit_s`` seconds.
        """
        names = ", ".join(plan.name for plan in plans)
        self._console.say(f"starting {names}")
        started = time.monotonic()
        tier: list[Child] = []
        self._tiers.append(tier)
        probes = [asyncio.create_task(probe) for probe in ready]
        try:
            for plan in plans:
                tier.append(await self._start_one(plan))
            ends = self._watch()
            waiting = set(probes)
            while waiting:
                left = started + limit_s - time.monotonic()
                done, _ = await asyncio.wait(
                    waiting | ends.keys(), timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
                )
                for end, child in ends.items():
                    if end in done:
                        raise self._ended(child, "" if child in self._ready else " before it was ready")
                if not done:
                    late = [(p.name, c) for p, c, t in zip(plans, tier, probes, strict=True) if not t.done()]
                    raise StackError(
                        f"{', '.join(name for name, _ in late)} was not ready after {limit_s:.0f} s; "
                        "--startup-timeout gives more",
                        late[0][1].tail,
                    )
                waiting -= done
                for probe in probes:
                    if probe in done:
                        probe.result()
        finally:
            for task in probes:
                task.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
        self._ready.update(tier)
        self._console.say(f"{names} ready after {time.monotonic() - started:.1f} s")

    async def until_one_ends(self) -> None:
        """Waits until a process ends. Raises StackError, which says which and how."""
        ends = self._watch()
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        raise self._ended(ends[done.pop()])

    async def stop(self) -> None:
        """Ends all processes, the last tier first; those that stay beyond their time are killed.

        Where a tier has ended, those before the last can serve nothing any more and would only wait: they are killed,
        so that the last tier can tell its clients at once.
        """
        running_tiers = [any(child.running for child in tier) for tier in self._tiers]
        first_ended = running_tiers.index(False) if False in running_tiers else len(running_tiers)
        for tier in self._tiers[first_ended + 1 : -1]:
            for child in tier:
                child.kill()
        for tier in reversed(self._tiers):
            running = [child for child in tier if child.running]
            for child in running:
                child.terminate()
            if not running:
                continue
            _, late = await asyncio.wait([child.end for child in running], timeout=self._grace)
            for child in running:
                if child.end in late:
                    self._console.say(f"{child.name} did not end within {self._grace:.0f} s; killing it")
                    child.kill()
            if late:
                await asyncio.wait(late)

    def kill(self) -> None:
        """Ends all processes at once."""
        for tier in self._tiers:
            for child in tier:
                child.kill()

    async def _start_one(self, plan: ProcessPlan) -> Child:
        try:
            return await Child.start(plan.name, plan.package, plan.args, plan.environment, self._console.line)
        except OSError as error:
            raise StackError(f"cannot start {plan.name}: {error}") from error

    def _watch(self) -> dict[asyncio.Task[int], Child]:
        return {child.end: child for tier in self._tiers for child in tier}

    @staticmethod
    def _ended(child: Child, when: str = "") -> StackError:
        status = describe_status(child.end.result())
        return StackError(f"{child.name} {status}{when}; its last lines:", child.tail)

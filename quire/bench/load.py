"""Sends sessions to a server: as they are due, or as fast as it takes them, and no more than so many at a time."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from quire.bench.fronts import Front
from quire.bench.records import Record, Session, continued

INTERRUPTED = "interrupted"
# Kinds of failures that no server is to blame for, or that follow from one that is counted already.
NOT_SENT = "earlier_turn_failed"


@dataclass
class Run:
    """What came of a load.

    Attributes:
        records: of all requests that were sent, and of later turns that could not be, in the order of their start.
        unsent: requests whose turn had not come when the run was interrupted.
        began, ended: in seconds of ``time.monotonic``.
    """

    records: list[Record] = field(default_factory=list)
    unsent: int = 0
    began: float = 0.0
    ended: float = 0.0

    @property
    def interrupted(self) -> bool:
        """Whether it was ended before its end."""
        return self.unsent > 0 or any(record.error == INTERRUPTED for record in self.records)


async def run_load(
    front: Front,
    sessions: Sequence[Session],
    max_concurrency: int | None = None,
    *,
    stop: asyncio.Event | None = None,
    on_end: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Runs all sessions to their end.

    A request is timed from when it was due, so that a client or a server that falls behind hides nothing; with
    ``max_concurrency``, and in later turns, from when it was sent.

    Args:
        front: the way to the server, entered.
        sessions: in the order of their start.
        max_concurrency: most requests at a time; None: no limit.
        stop: ends the run when it is set.
        on_end: called with each request that is through.
    """
    load = _Load(front, max_concurrency, on_end)
    sending = asyncio.create_task(load.send(sessions))
    waiting = [sending] if stop is None else [sending, asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = sending.done()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    if ended:
        sending.result()
    run = load.run
    run.ended = time.monotonic()
    run.unsent = sum(len(session.turns) for session in sessions) - len(run.records)
    return run


class _Load:
    def __init__(self, front: Front, max_concurrency: int | None, on_end: Callable[[Record], None]) -> None:
        self.run = Run()
        self._front, self._on_end = front, on_end
        self._room = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def send(self, sessions: Sequence[Session]) -> None:
        self.run.began = start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                due = None if session.due is None else start + session.due
                if due is not None:
                    await asyncio.sleep(due - time.monotonic())
                async with AsyncExitStack() as held:
                    if self._room is not None:
                        # Before the task is made, so that sessions start in order, and not all wait as tasks.
                        await held.enter_async_context(self._room)
                    began = due if due is not None and self._room is None else time.monotonic()
                    group.create_task(self._session(session, began, held.pop_all()))

    async def _session(self, session: Session, began: float, held: AsyncExitStack) -> None:
        async with held:
            prompt = session.turns[0].prompt
            for place, job in enumerate(session.turns):
                record = Record(began, started=len(self.run.records))
                self.run.records.append(record)
                try:
                    await self._front.run(replace(job, prompt=prompt), record)
                    if not record.error and place + 1 < len(session.turns):
                        prompt = continued(prompt, record, session.turns[place + 1].prompt)
                except asyncio.CancelledError:
                    record.error, record.ended = INTERRUPTED, time.monotonic()
                    raise
                self._on_end(record)
                began = time.monotonic()
                if record.error:
                    for _ in session.turns[place + 1 :]:
                        missed = Record(began, ended=began, error=NOT_SENT, detail=f"a turn failed: {record.error}")
                        self.run.records.append(missed)
                        self._on_end(missed)
                    return

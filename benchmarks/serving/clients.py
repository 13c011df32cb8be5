"""Processes that send requests: several, so that the clients are not what is measured."""

import asyncio
import multiprocessing
import time
from collections import deque
from multiprocessing.connection import Connection
from types import TracebackType

import uvloop

from benchmarks.serving.streams import FRONTS
from quire.bench.fronts import Front
from quire.bench.records import Job, Record

# Until all processes have the jobs and wait for the start.
_DELIVERY_S = 1.0


class Clients:
    """Client processes of one front, which last as long as this context.

    Args:
        front: a name in ``FRONTS``.
        address: host:port of the server.
        model: as the server calls it.
        count: processes.
    """

    def __init__(self, front: str, address: str, model: str, count: int) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            own, theirs = spawning.Pipe()
            process = spawning.Process(target=_serve, args=(theirs, front, address, model), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(own)
            self._processes.append(process)

    def __enter__(self) -> "Clients":
        for pipe in self._pipes:
            pipe.recv()  # it has imported what it needs
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def run(self, jobs: list[Job], streams: int) -> list[Record]:
        """Sends all jobs, at most ``streams`` at a time; those with a time to be sent at, whatever else still runs.

        Returns:
            Their records, in the jobs' order.

        Raises:
            ConnectionError: one of them failed.
        """
        pipes = self._pipes[:streams]
        count = len(pipes)
        start = time.monotonic() + _DELIVERY_S
        for number, pipe in enumerate(pipes):
            pipe.send((jobs[number::count], -(-(streams - number) // count), start))
        records: list[Record] = [Record(start)] * len(jobs)
        for number, pipe in enumerate(pipes):
            try:
                answer = pipe.recv()
            except EOFError as error:
                raise ConnectionError("a client process ended by itself; its traceback is above") from error
            if isinstance(answer, str):
                raise ConnectionError(answer)
            records[number::count] = answer
        return records


def _serve(pipe: Connection, front: str, address: str, model: str) -> None:
    uvloop.run(_run_all(pipe, FRONTS[front](address, model)))


async def _run_all(pipe: Connection, front: Front) -> None:
    async with front:
        pipe.send("ready")
        while True:
            try:
                jobs, streams, start = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            try:
                pipe.send(await _run(front, jobs, streams, start))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")


async def _run(front: Front, jobs: list[Job], streams: int, start: float) -> list[Record]:
    records: list[Record] = [Record(start)] * len(jobs)
    waiting = deque(enumerate(jobs))
    await asyncio.sleep(start - time.monotonic())

    async def one(place: int, job: Job, began: float) -> None:
        records[place] = record = Record(began, started=place)
        await front.run(job, record)
        if record.error:
            raise ConnectionError(f"{record.error}: {record.detail}")
        if record.tokens != job.max_tokens:
            raise ConnectionError(f"an output has {record.tokens} tokens, of {job.max_tokens} that were asked for")

    async def stream() -> None:
        while waiting:
            place, job = waiting.popleft()
            await one(place, job, time.monotonic())

    async with asyncio.TaskGroup() as group:
        if jobs and jobs[0].due is not None:
            for place, job in enumerate(jobs):
                due = start + (job.due or 0.0)
                await asyncio.sleep(due - time.monotonic())
                group.create_task(one(place, job, due))
        else:
            for _ in range(streams):
                group.create_task(stream())
    return records

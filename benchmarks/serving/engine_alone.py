"""The same requests without any server: ``quire.LLMEngine`` in a process of its own, one thread, no sockets."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from quire import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from quire.bench.records import Job, Record


class EngineAlone:
    """An engine in a process of its own, as long as this context lasts.

    Args:
        model: a folder or .gguf file.
        arguments: of ``quire.EngineArgs``.
    """

    def __init__(self, model: Path, arguments: dict[str, Any]) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, model, arguments))
        self._process.start()
        theirs.close()

    def __enter__(self) -> "EngineAlone":
        self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def run(self, jobs: list[Job], streams: int) -> list[Record]:
        """Runs all jobs, ``streams`` at a time. Returns their records in the jobs' order."""
        self._pipe.send((jobs, streams))
        records: list[Record] = self._answer()
        return records

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise RuntimeError("the engine's process ended; its traceback is above") from error


def _serve(pipe: Connection, model: Path, arguments: dict[str, Any]) -> None:
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(model=model, **arguments))
        pipe.send("ready")
        while True:
            jobs, streams = pipe.recv()
            pipe.send(_run(engine, jobs, streams))
    except EOFError:
        engine.close()


def _run(engine: LLMEngine, jobs: list[Job], streams: int) -> list[Record]:
    records: list[Record] = []
    while len(records) < len(jobs) or engine.has_unfinished_requests():
        while len(records) < len(jobs) and engine.get_num_unfinished_requests() < streams:
            job = jobs[len(records)]
            params = SamplingParams(
                temperature=0.0,
                max_tokens=job.max_tokens,
                ignore_eos=True,
                skip_reading_prefix_cache=not job.reads_cache,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(len(records)), job.prompt, params)
            records.append(Record(time.monotonic(), started=len(records)))
        for output in engine.step():
            record, new = records[int(output.request_id)], output.outputs[0]
            record.times.append(time.monotonic())
            record.token_ids += new.token_ids
            record.text += new.text
            record.tokens += len(new.token_ids)
    return records

"""Runs the engine on a thread of its own and hands what comes out to the event loop."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from protos import worker_pb2
from worker.engine import Engine
from worker.prefix_changes import PrefixChanges
from worker.sequence import FinishReason, Sequence
from worker.step_clock import StepClock
from worker.step_plan import StepOutput

logger = logging.getLogger(__name__)


class EngineLoop:
    """Owns the engine: nobody else touches it once ``start`` was called.

    Args:
        engine: built, and not yet running.
        on_output: called on the event loop after every step, with the load it left.
        on_prefix_changes: called on the event loop after steps that changed what the prefix cache knows, before their
            output; only while it is watched.
        on_failure: called on the event loop once, when a step raised or the engine was lost; it is dead from then on.

    Attributes:
        clock: how long steps take.
    """

    def __init__(
        self,
        engine: Engine,
        on_output: Callable[[StepOutput, worker_pb2.Load], None],
        on_prefix_changes: Callable[[PrefixChanges], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_output = on_output
        self._on_prefix_changes = on_prefix_changes
        self._on_failure = on_failure
        # Bounded by the slots that the server gives out, an add and a cancel for each, and by its streams.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.clock = StepClock()
        self._failed = False

    @property
    def step(self) -> int:
        """Steps ended since the start."""
        return self._engine.num_steps

    def start(self) -> worker_pb2.Load:
        """Starts the thread; outputs go to the running event loop. Returns the load at rest."""
        self._loop = loop = asyncio.get_running_loop()

        def on_failure(error: Exception) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        self._engine.watch(on_failure)
        load = self._load()
        self._thread.start()
        return load

    def stop(self, timeout: float) -> None:
        """Ends the thread after the running step, for which it waits at most ``timeout`` seconds, and the engine."""
        self._commands.put(None)
        self._thread.join(timeout)
        self._engine.close()

    def add(self, seq: Sequence) -> None:
        """Queues a sequence for the engine."""
        self._commands.put(lambda: self._engine.add(seq))

    def cancel(self, seq: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends a sequence before the next step."""
        self._commands.put(lambda: self._engine.cancel(seq, reason))

    def watch_prefixes(self, on_snapshot: Callable[[list[bytes]], None]) -> None:
        """Calls ``on_snapshot`` on the event loop with all names that the prefix cache knows; all changes follow it."""
        self._commands.put(lambda: self._snapshot(on_snapshot))

    def unwatch_prefixes(self) -> None:
        """Nobody wants to hear of changes any more."""
        self._commands.put(self._engine.scheduler.pool.stop_recording)

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while self._obey():
                self.clock.start()
                output = self._engine.step()
                self.clock.stop()
                self._hand_out_changes()
                self._loop.call_soon_threadsafe(self._on_output, output, self._load())
        except Exception as error:  # whatever a step raises, the requests must hear of it
            logger.exception("engine step failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        """Reports the first failure; a lost part of the engine makes a running step raise as well."""
        if not self._failed:
            self._failed = True
            self._on_failure(error)

    def _obey(self) -> bool:
        """Carries out the commands that came, waiting for one when there is nothing to run. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _snapshot(self, on_snapshot: Callable[[list[bytes]], None]) -> None:
        assert self._loop is not None
        self._hand_out_changes()  # they are in the snapshot: to tell of them after it would be wrong
        pool = self._engine.scheduler.pool
        pool.record_changes()
        self._loop.call_soon_threadsafe(on_snapshot, pool.names())

    def _hand_out_changes(self) -> None:
        assert self._loop is not None
        if changes := self._engine.scheduler.pool.take_changes():
            self._loop.call_soon_threadsafe(self._on_prefix_changes, changes)

    def _load(self) -> worker_pb2.Load:
        scheduler = self._engine.scheduler
        speculator = scheduler.speculator
        return worker_pb2.Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            free_blocks=scheduler.pool.num_free,
            cached_blocks=scheduler.pool.num_cached,
            num_preemptions=scheduler.num_preemptions,
            prefill_tokens=scheduler.num_prefill_tokens,
            busy_us=int(self.clock.busy * 1e6),
            draft_tokens=0 if speculator is None else speculator.num_draft_tokens,
            accepted_tokens=0 if speculator is None else speculator.num_accepted_tokens,
        )

"""The engine: plan, launch, settle, again. Single-threaded; knows neither tensors nor the network."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from worker.scheduler import Sampled, Scheduler, StepOutput, StepPlan
from worker.sequence import FinishReason, Sequence


@dataclass(frozen=True)
class EngineLimits:
    """What the worker tells its routers about itself. Units as in Hello (protos/worker.proto)."""

    model: str
    manifest_hash: str
    vocab_size: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class LaunchedStep(Protocol):
    """A step that may still be running."""

    def sampled(self) -> Sampled:
        """Waits for the step and returns what it computed for the host."""


class Runner(Protocol):
    """What the engine needs of whatever computes the steps."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a step. Steps run in the order of their launch."""

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Calls ``on_failure``, on any thread, when what computes the steps is lost, be it between two steps."""

    def close(self) -> None:
        """Ends what computes the steps; nothing is launched after this."""


class Engine:
    """Runs sequences to their end.

    Args:
        scheduler: decides what each step computes.
        runner: computes it.
        async_scheduling: plan and launch a step before the one before it is settled, so that the device never waits
            for the host. Costs a wasted row when a sequence ends by a stop token.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, async_scheduling: bool = False) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._depth = 2 if async_scheduling else 1
        self._in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self._ended: list[Sequence] = []
        self._with_deadline: set[Sequence] = set()
        self.num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self.scheduler.has_unfinished or bool(self._in_flight) or bool(self._ended)

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence; its tokens come out of ``step``."""
        self.scheduler.add(seq)
        if seq.deadline is not None:
            self._with_deadline.add(seq)

    def cancel(self, seq: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends a sequence; the next ``step`` reports it. Does nothing when it had ended already."""
        if self.scheduler.cancel(seq, reason):
            self._ended.append(seq)

    def step(self) -> StepOutput:
        """Launches the next step and settles the oldest one that is due.

        Returns:
            What that step sampled and what ended meanwhile; empty when nothing could run.
        """
        self._expire()
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append((plan, self._runner.launch(plan)))
        output = StepOutput(self.num_steps)
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            settled, launched = self._in_flight.popleft()
            output = self.scheduler.settle(settled, launched.sampled())
            self.num_steps = settled.number
        output.finished += self._ended
        self._ended = []
        self._with_deadline.difference_update(output.finished)
        return output

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Calls ``on_failure``, on any thread, when steps can run no more; a step that runs then raises too."""
        self._runner.watch(on_failure)

    def close(self) -> None:
        """Gives up what the steps were computed with; no step may follow."""
        self._runner.close()

    def _expire(self) -> None:
        if self._with_deadline:
            now = time.monotonic()
            for seq in [seq for seq in self._with_deadline if seq.deadline is not None and seq.deadline <= now]:
                self.cancel(seq, FinishReason.DEADLINE)
                self._with_deadline.discard(seq)

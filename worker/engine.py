"""The engine: plan, launch, settle, again. Single-threaded; knows neither tensors nor the network."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from worker.grammar_masks import GrammarMasks
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, Sequence
from worker.step_plan import Sampled, StepOutput, StepPlan


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
    takes_priorities: bool = False
    enable_prefix_caching: bool = True


class LaunchedStep(Protocol):
    """A step that may still be running."""

    def sample(self, bitmask: NDArray[np.int32]) -> None:
        """Goes on with a step that was launched up to its sampling.

        Args:
            bitmask: [constrained, words], see ``StepMasks``.
        """

    def sampled(self) -> Sampled:
        """Waits for the step and returns what it computed for the host."""


class Runner(Protocol):
    """What the engine needs of whatever computes the steps."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a step. Steps run in the order of their launch.

        A plan with constrained samples is computed up to its logits: ``sample`` is to be called before the next launch.
        """

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
        self._masks = GrammarMasks()
        self._async = async_scheduling
        self._in_flight: tuple[StepPlan, LaunchedStep] | None = None
        self._ended: list[Sequence] = []
        self._with_deadline: set[Sequence] = set()
        self.num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self.scheduler.has_unfinished or self._in_flight is not None or bool(self._ended)

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
        """Launches the next step and settles the one that is due.

        Where grammars are followed, the next step is launched up to its logits, and sampled once the one before it is
        settled: only then the masks can be known. The device computes logits meanwhile.

        Steps with drafts are not overlapped: how many tokens they come to, and so where the next one begins, is known
        once they are settled, and drafts themselves follow from known tokens. While no sequence may get drafts, steps
        overlap as without speculation.

        Returns:
            What the settled step sampled and what ended meanwhile; empty when nothing could run.
        """
        self._expire()
        in_flight = None if self._in_flight is None else self._in_flight[0]
        early = None
        if in_flight is not None and (in_flight.drafts or self.scheduler.speculates):
            early = self._settle()
        plan = self.scheduler.plan()
        launched = None if plan is None else self._runner.launch(plan)
        output = self._settle() if early is None else early
        if plan is not None and launched is not None:
            if plan.constrained:
                launched.sample(self._make_masks(plan))
            self._in_flight = plan, launched
            if not self._async:
                output = self._settle()
        output.finished += self._ended
        self._ended = []
        self._with_deadline.difference_update(output.finished)
        return output

    def _settle(self) -> StepOutput:
        """Waits for the step in flight, if there is one."""
        if self._in_flight is None:
            return StepOutput(self.num_steps)
        plan, launched = self._in_flight
        self._in_flight = None
        self.num_steps = plan.number
        return self.scheduler.settle(plan, launched.sampled())

    def _make_masks(self, plan: StepPlan) -> NDArray[np.int32]:
        """The masks of a launched plan. Ends sequences to which nothing can be added; their samples are dropped."""
        masks = self._masks.fill(plan)
        for seq, error in masks.ended:
            seq.error = error
            self.cancel(seq, FinishReason.ERROR if error else FinishReason.STOP)
        return masks.bitmask

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

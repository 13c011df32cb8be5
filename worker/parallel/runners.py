"""One step on all ranks: the leader sends the plan, each rank computes its share, the leader samples for all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from worker.engine import LaunchedStep
from worker.kv_cache import KVCache
from worker.model_runner import ModelRunner
from worker.models import CausalLM
from worker.parallel.group import leave_group
from worker.parallel.plan_wire import PlanPacker, RankPlan
from worker.parallel.ranks import Ranks
from worker.parallel.shards import Parallel
from worker.step_input import InputBuilder
from worker.step_plan import Sampled, StepPlan


class LeaderRunner:
    """Runs steps on this rank and all others.

    Args:
        runner: computes the leader's share, and samples.
        ranks: the other ranks, ready for steps.
        parallel: the leader's place.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks, parallel: Parallel) -> None:
        self._runner = runner
        self._ranks = ranks
        self._parallel = parallel
        self._packer = PlanPacker()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a step on all ranks. Raises RankFailed when one of them is gone or does not keep up."""
        with self._explained():
            self._ranks.send(self._packer.pack(plan))
            launched = self._runner.launch(plan)
            if plan.constrained:
                return _WaitingStep(launched, self._sample)
            if plan.samples:
                share_tokens(self._runner.inputs.last_tokens, self._parallel)
        return launched

    def _sample(self, launched: LaunchedStep, bitmask: NDArray[np.int32]) -> None:
        """The end of a step with grammars, whose other ranks wait for the ids."""
        with self._explained():
            launched.sample(bitmask)
            share_tokens(self._runner.inputs.last_tokens, self._parallel)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises RankFailed for whatever a lost rank makes fail."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            failure = self._ranks.explain(error)
            raise failure from failure.__cause__

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Calls ``on_failure``, on another thread, when a rank ends or stops, be it between two steps."""
        self._ranks.watch(on_failure)

    def close(self) -> None:
        """Ends the other ranks."""
        self._ranks.close()
        if not self._ranks.failed:  # else an operation may still be waiting in the group, and so would this
            leave_group()


@dataclass(frozen=True)
class _WaitingStep:
    """A step whose sampling waits for masks; ``finish`` samples for all ranks."""

    launched: LaunchedStep
    finish: Callable[[LaunchedStep, NDArray[np.int32]], None]

    def sample(self, bitmask: NDArray[np.int32]) -> None:
        self.finish(self.launched, bitmask)

    def sampled(self) -> Sampled:
        return self.launched.sampled()


class RankRunner:
    """Computes a rank's share of each step.

    Args:
        model: this rank's share.
        cache: the same of keys and values.
        inputs: builds the steps' tensors.
        parallel: this rank's place.
    """

    def __init__(self, model: CausalLM, cache: KVCache, inputs: InputBuilder, parallel: Parallel) -> None:
        self._model = model
        self._cache = cache
        self._parallel = parallel
        self._inputs = inputs

    @torch.inference_mode()
    def run(self, step: RankPlan) -> None:
        """Does what the leader does in ``ModelRunner.launch``, except for what it does alone."""
        inputs = self._inputs.build(step.plan)
        hidden = self._model(inputs.token_ids, inputs.positions, self._cache, inputs.attention)
        for tokens in step.logit_calls:
            self._model.logits(hidden.index_select(0, torch.tensor(tokens, device=hidden.device)))
        if step.plan.samples:
            share_tokens(self._inputs.last_tokens, self._parallel)


def share_tokens(last_tokens: torch.Tensor, parallel: Parallel) -> None:
    """Overwrites each rank's last sampled ids, [rows] int64, with the leader's: the next step's input."""
    dist.broadcast(last_tokens, src=0, group=parallel.group)

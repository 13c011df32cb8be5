"""One step on all ranks: the leader sends the plan, each rank computes its share, the leader samples for all."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from worker.engine import LaunchedStep
from worker.kv_cache import KVCache
from worker.model_runner import ModelRunner
from worker.models import CausalLM
from worker.parallel.group import leave_group
from worker.parallel.plan_wire import PlanPacker, RankPlan
from worker.parallel.ranks import Ranks
from worker.parallel.shards import Parallel
from worker.scheduler import StepPlan
from worker.step_input import InputBuilder


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
        try:
            self._ranks.send(self._packer.pack(plan))
            launched = self._runner.launch(plan)
            if plan.samples:
                share_tokens(self._runner.inputs.last_tokens, self._parallel)
        except (RuntimeError, OSError) as error:
            failure = self._ranks.explain(error)
            raise failure from failure.__cause__
        return launched

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Calls ``on_failure``, on another thread, when a rank ends or stops, be it between two steps."""
        self._ranks.watch(on_failure)

    def close(self) -> None:
        """Ends the other ranks."""
        self._ranks.close()
        if not self._ranks.failed:  # else an operation may still be waiting in the group, and so would this
            leave_group()


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

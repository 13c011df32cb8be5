"""Steps in which every sequence computes one token, replayed from CUDA graphs: the host launches one thing, not
hundreds.

A graph is captured for each of a few numbers of sequences; a step takes the smallest that holds it, and leaves the rest
of its places unused. Steps with groups of sequences that share a prefix have graphs of their own, for fewer numbers:
that others pass by unused places costs them less than they save.
"""

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from worker.gpu_columns import send
from worker.gpu_input import GpuInputBuilder
from worker.kv_cache import KVCache
from worker.models import CausalLM
from worker.shared_prefixes import PrefixGroup
from worker.step_input import StepInput
from worker.step_plan import StepPlan

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences to capture graphs for: dense where a step is short, sparser above."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 512, 32)]
    kept = [size for size in sizes if size < max_num_seqs]
    return [*kept, min(max_num_seqs, 512)]


def prefix_graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences to capture graphs with shared prefixes for; none where so few sequences save too little."""
    sizes = [16, 32, 64, 128, 256]
    return [size for size in sizes if size < max_num_seqs] + [min(max_num_seqs, 512)] if max_num_seqs >= 16 else []


class DecodeGraphs:
    """The captured graphs of one model.

    Args:
        model, cache, inputs: what the steps are computed with; the graphs keep their addresses.
        sizes: numbers of sequences, ascending.
        prefix_sizes: those of graphs with shared prefixes, ascending; none: such steps are computed like others.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        inputs: GpuInputBuilder,
        sizes: list[int],
        prefix_sizes: list[int],
    ) -> None:
        self._model, self._cache, self._inputs = model, cache, inputs
        self._sizes, self._prefix_sizes = sizes, prefix_sizes
        # By size and whether prefixes are shared; the largest first, so that the smaller ones reuse its memory.
        self._kinds = [(size, True) for size in reversed(prefix_sizes)] + [(size, False) for size in reversed(sizes)]
        longest = max(inputs.decode_size(*kind) for kind in self._kinds)
        self._packed = torch.empty(longest, dtype=torch.int32, device=inputs.device)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, StepInput, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    @torch.inference_mode()
    def capture(self, pool: "_POOL_HANDLE", on_captured: Callable[[], None]) -> None:
        """Captures all graphs into a pool of memory."""
        for size, prefixes in self._kinds:
            self._send(StepPlan(0), size, [] if prefixes else None)
            self._compute(size, prefixes)  # compiles and loads the kernels, which a capture must not
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step, logits = self._compute(size, prefixes)
            self._graphs[size, prefixes] = (graph, step, logits)
            on_captured()

    def replay(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Starts the step.

        Returns:
            Logits [samples, vocab] and rows [samples] int64 of ``plan.samples``, valid until the next step; None when
            the step is not of this kind, or too large.
        """
        count = len(plan.rows)
        if count > self._sizes[-1] or len(plan.token_ids) != count or plan.prompt_logprobs:
            return None
        groups = self._inputs.find_groups(plan)
        prefixes = bool(groups and self._prefix_sizes)
        sizes = self._prefix_sizes if prefixes else self._sizes
        size = sizes[bisect.bisect_left(sizes, count)]
        self._send(plan, size, groups if prefixes else None)
        graph, step, logits = self._graphs[size, prefixes]
        graph.replay()
        if len(plan.samples) == count:
            return logits[:count], step.sample_rows[:count]
        wanted = torch.tensor(plan.samples, device=logits.device)
        return logits[wanted], step.sample_rows[wanted]

    def _send(self, plan: StepPlan, size: int, groups: list[PrefixGroup] | None) -> None:
        packed = self._inputs.decode_columns(plan, size, groups)
        send(packed, self._packed[: len(packed)])

    def _compute(self, size: int, prefixes: bool) -> tuple[StepInput, torch.Tensor]:
        packed = self._packed[: self._inputs.decode_size(size, prefixes)]
        step = self._inputs.decode_input(packed, size, prefixes)
        hidden = self._model(step.token_ids, step.positions, self._cache, step.attention)
        return step, self._model.logits(hidden)

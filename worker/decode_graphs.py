"""Steps in which every sequence computes one token, replayed from CUDA graphs: the host launches one thing, not
hundreds.

A graph is captured for each of a few numbers of sequences; a step takes the smallest that holds it, and leaves the rest
of its places unused.
"""

import bisect
from collections.abc import Callable

import torch

from worker.gpu_input import GpuInputBuilder, decode_size, send
from worker.kv_cache import KVCache
from worker.models import CausalLM
from worker.step_input import StepInput
from worker.step_plan import StepPlan


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences to capture graphs for: dense where a step is short, sparser above."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 512, 32)]
    kept = [size for size in sizes if size < max_num_seqs]
    return [*kept, min(max_num_seqs, 512)]


class DecodeGraphs:
    """The captured graphs of one model.

    Args:
        model, cache, inputs: what the steps are computed with; the graphs keep their addresses.
        sizes: numbers of sequences, ascending.
    """

    def __init__(self, model: CausalLM, cache: KVCache, inputs: GpuInputBuilder, sizes: list[int]) -> None:
        self._model, self._cache, self._inputs = model, cache, inputs
        self._sizes = sizes
        self._packed = torch.empty(decode_size(sizes[-1]), dtype=torch.int32, device=inputs.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, StepInput, torch.Tensor]] = {}

    @torch.inference_mode()
    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """Captures all graphs, the largest first, so that the smaller ones reuse its memory."""
        pool = None
        for done, size in enumerate(reversed(self._sizes)):
            unused = StepPlan(0)
            send(self._inputs.decode_columns(unused, size), self._packed[: decode_size(size)])
            self._compute(size)  # compiles and loads the kernels, which a capture must not
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step, logits = self._compute(size)
            pool = graph.pool()
            self._graphs[size] = (graph, step, logits)
            on_progress(done + 1, len(self._sizes))

    def replay(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Starts the step.

        Returns:
            Logits [samples, vocab] and rows [samples] int64 of ``plan.samples``, valid until the next step; None when
            the step is not of this kind, or too large.
        """
        count = len(plan.rows)
        if count > self._sizes[-1] or len(plan.token_ids) != count or plan.prompt_logprobs:
            return None
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        send(self._inputs.decode_columns(plan, size), self._packed[: decode_size(size)])
        graph, step, logits = self._graphs[size]
        graph.replay()
        if len(plan.samples) == count:
            return logits[:count], step.sample_rows[:count]
        wanted = torch.tensor(plan.samples, device=logits.device)
        return logits[wanted], step.sample_rows[wanted]

    def _compute(self, size: int) -> tuple[StepInput, torch.Tensor]:
        step = self._inputs.decode_input(self._packed[: decode_size(size)], size)
        hidden = self._model(step.token_ids, step.positions, self._cache, step.attention)
        return step, self._model.logits(hidden)

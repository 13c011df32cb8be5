"""Steps with prompts in them, replayed from CUDA graphs: of few tokens, they are over before a host could launch them.

A graph is captured for each of a few numbers of tokens, and takes any step that has no more: the sequences of one token
come first, the others' tokens follow, and what they are is read on the GPU. Larger steps keep the GPU busy for longer
than it takes to launch them operation by operation.
"""

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from worker.gpu_columns import MixedSize, send
from worker.gpu_input import GpuInputBuilder
from worker.kv_cache import KVCache
from worker.models import CausalLM
from worker.step_plan import StepPlan

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_TILE = 128  # of a product's rows: between two multiples of it, fewer tokens save nothing


def mixed_graph_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens to capture graphs for: dense where a step is short."""
    sizes = [16, 32, 64, *range(_TILE, 257, _TILE // 2), *range(384, 1281, _TILE), 1536, 2048]
    largest = min(max_num_batched_tokens, sizes[-1])
    return [size for size in sizes if size < largest] + [largest]


class MixedGraphs:
    """The captured graphs of one model.

    Args:
        model, cache, inputs: what the steps are computed with; the graphs keep their addresses.
        sizes: numbers of tokens, ascending.
    """

    def __init__(self, model: CausalLM, cache: KVCache, inputs: GpuInputBuilder, sizes: list[int]) -> None:
        self._model, self._cache, self._inputs = model, cache, inputs
        self._sizes = [inputs.mixed_size(size) for size in sizes]
        longest = max(size.integers for size in self._sizes)
        self._packed = torch.empty(longest, dtype=torch.int32, device=inputs.device)
        self._graphs: dict[MixedSize, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    @torch.inference_mode()
    def capture(self, pool: "_POOL_HANDLE", on_captured: Callable[[], None]) -> None:
        """Captures all graphs, the largest first, so that the others reuse its memory, which is the pool's."""
        for size in reversed(self._sizes):
            columns = self._inputs.mixed_columns(StepPlan(0), size)
            assert columns is not None
            self._send(columns[0])
            self._compute(size)  # compiles and loads the kernels, which a capture must not
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = self._compute(size)
            self._graphs[size] = (graph, hidden)
            on_captured()

    def replay(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Starts the step.

        Returns:
            The last layer's output [tokens or more, hidden], valid until the next step; and of what is to be sampled,
            as in ``StepInput``, its places among the tokens and its rows. None when the step is too large.
        """
        place = bisect.bisect_left(self._sizes, len(plan.token_ids), key=lambda size: size.tokens)
        if place == len(self._sizes):
            return None
        size = self._sizes[place]
        columns = self._inputs.mixed_columns(plan, size)
        if columns is None:
            return None
        packed, sample_tokens, sample_rows = columns
        self._send(packed)
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden, sample_tokens, sample_rows

    def _send(self, packed: np.ndarray) -> None:
        send(packed, self._packed[: len(packed)])

    def _compute(self, size: MixedSize) -> torch.Tensor:
        step = self._inputs.mixed_input(self._packed[: size.integers], size)
        return self._model(step.token_ids, step.positions, self._cache, step.attention)

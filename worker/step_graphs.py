"""All steps that are replayed from CUDA graphs, in one pool of memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.decode_graphs import DecodeGraphs, graph_sizes, prefix_graph_sizes
from worker.gpu_input import GpuInputBuilder
from worker.kv_cache import KVCache
from worker.mixed_graphs import MixedGraphs, mixed_graph_sizes
from worker.models import CausalLM


@dataclass(frozen=True)
class GraphSizes:
    """What graphs are captured for, each ascending.

    Attributes:
        mixed: tokens of steps with prompts.
        prefixes: sequences of steps without prompts, some of which share a prefix.
        decode: sequences of all other steps without prompts.
    """

    mixed: list[int]
    prefixes: list[int]
    decode: list[int]

    @classmethod
    def of(cls, max_num_seqs: int, max_num_batched_tokens: int, prefixes: bool) -> "GraphSizes":
        """All that are worth it, with ``prefixes`` where steps may share some."""
        return cls(
            mixed_graph_sizes(max_num_batched_tokens),
            prefix_graph_sizes(max_num_seqs) if prefixes else [],
            graph_sizes(max_num_seqs),
        )


class StepGraphs:
    """The graphs of one model. A replay's results are valid until the next one, of whichever kind.

    Args:
        model, cache, inputs: what the steps are computed with; the graphs keep their addresses.
        sizes: what to capture.
    """

    def __init__(self, model: CausalLM, cache: KVCache, inputs: GpuInputBuilder, sizes: GraphSizes) -> None:
        self.mixed = MixedGraphs(model, cache, inputs, sizes.mixed)
        self.decode = DecodeGraphs(model, cache, inputs, sizes.decode, sizes.prefixes)

    def capture(self, on_progress: Callable[[int, int], None]) -> None:
        """Captures all graphs, those of the largest steps first. ``on_progress`` is told how many there are of all."""
        pool = torch.cuda.graph_pool_handle()
        done, total = 0, len(self.mixed) + len(self.decode)

        def on_captured() -> None:
            nonlocal done
            done += 1
            on_progress(done, total)

        self.mixed.capture(pool, on_captured)
        self.decode.capture(pool, on_captured)

"""What a GPU's memory is needed for beside weights and KV cache: measured by computing the largest step there can be.

The step runs in a small cache of its own, which is given back; what is then left of the worker's share is for the real
one. So no admitted load can run out of memory later.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from worker.gpu_input import GpuInputBuilder
from worker.kv_cache import KVCache
from worker.model_runner import ModelRunner
from worker.models import CausalLM
from worker.sequence import SamplingParams, token_array
from worker.step_graphs import GraphSizes, StepGraphs
from worker.step_plan import History, StepPlan

# What the allocator may lose between blocks of other sizes than those that were measured.
_SLACK = 256 * 2**20
_GIB = 2**30


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of one GPU.

    Attributes:
        total: of the GPU.
        taken: by weights, CUDA itself, and other processes.
        steps: that the largest step needs for what it computes.
        graphs: that captured steps will need.
    """

    total: int
    taken: int
    steps: int
    graphs: int

    def left(self, utilization: float) -> int:
        """Bytes for the KV cache when this share of the GPU may be used; negative when there are none."""
        return int(self.total * utilization) - self.taken - self.steps - self.graphs - _SLACK

    def describe(self, utilization: float) -> str:
        """The sum, for people."""
        parts = (self.total * utilization, self.total, self.taken, self.steps, self.graphs)
        return "{:.1f} GiB of {:.1f}, less {:.1f} for weights and CUDA, {:.2f} for steps, {:.2f} for graphs".format(
            *(part / _GIB for part in parts)
        )


def largest_step(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int, num_samples: int = 0
) -> StepPlan:
    """A step that takes the most memory: as many tokens as one may have, for as many sequences as may run, all of them
    sampled under every rule that costs something. Its blocks are 0 and up.

    ``num_samples``, where steps may sample more tokens than sequences run: those of drafts.
    """
    tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    each, more = divmod(tokens, max_num_seqs)
    # Sequences of one token come first.
    counts = sorted(each + (place < more) for place in range(max_num_seqs))
    rows = list(range(max_num_seqs))
    plan = StepPlan(0, rows=rows, starts=[0] * max_num_seqs, counts=counts, samples=rows, started_rows=rows)
    used = 0
    for count in counts:
        blocks = -(-count // block_size)
        plan.block_tables.append(list(range(used, used + blocks)))
        used += blocks
    plan.token_ids.extend([0] * tokens)
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20)
    plan.samples = rows + rows[-1:] * (num_samples - max_num_seqs)
    plan.sampling, plan.output_indices = [params] * len(plan.samples), [0] * len(plan.samples)
    plan.histories = [History(row, token_array(), token_array()) for row in rows]
    return plan


def profile_memory(
    model: CausalLM,
    plan: StepPlan,
    vocab_size: int,
    make_cache: Callable[[int], KVCache],
    make_inputs: Callable[[KVCache], GpuInputBuilder],
    graphs: bool,
    device: torch.device,
) -> MemoryProfile:
    """Computes ``plan``, see ``largest_step``, and captures steps when ``graphs`` says that some will be.

    Args:
        model: with its weights, on ``device``, a GPU.
        vocab_size: of the model.
        make_cache: a cache of so many blocks.
        make_inputs: what builds steps for that cache.

    Raises:
        torch.OutOfMemoryError: not even one step fits beside the weights.
    """
    max_num_seqs = len(plan.rows)
    _give_back()
    held = torch.cuda.memory_reserved(device)
    cache = make_cache(1 + plan.block_tables[-1][-1])
    cached = torch.cuda.memory_reserved(device) - held
    torch.cuda.reset_peak_memory_stats(device)
    inputs = make_inputs(cache)
    runner = ModelRunner(model, cache, inputs, max_num_seqs, vocab_size, device)
    runner.launch(plan).sampled()
    steps = torch.cuda.max_memory_reserved(device) - held - cached
    captured = 0
    if graphs:
        sizes = GraphSizes.of(max_num_seqs, len(plan.token_ids), inputs.grouping is not None)
        captured = _graphs_memory(model, cache, inputs, sizes, device)
    del runner, inputs, cache
    _give_back()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryProfile(total, total - free, steps, captured)


def _graphs_memory(
    model: CausalLM, cache: KVCache, inputs: GpuInputBuilder, sizes: GraphSizes, device: torch.device
) -> int:
    """Bytes of all graphs, from the two largest of each kind: what the second one needs beyond the memory that it
    shares with those before it, each smaller one needs at most."""
    free: list[int] = []

    def measure(*_: int) -> None:
        torch.cuda.synchronize(device)
        free.append(torch.cuda.mem_get_info(device)[0])

    _give_back()
    measure()
    kinds = [sizes.mixed, sizes.prefixes, sizes.decode]
    StepGraphs(model, cache, inputs, GraphSizes(*(kind[-2:] for kind in kinds))).capture(measure)
    needed = iter([max(0, before - after) for before, after in pairwise(free)])
    total = 0
    for kind in kinds:
        total += next(needed) if kind else 0
        total += (len(kind) - 1) * next(needed) if len(kind) > 1 else 0
    return total


def _give_back() -> None:
    """Returns memory that is not in use to the GPU, so that it can be counted."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()

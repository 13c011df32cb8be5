"""Puts together what computes steps of a loaded model on its device, and runs the first ones."""

from typing import TYPE_CHECKING

import torch

from kernels.attention import key_tile
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.kv_cache import KVCache
from worker.models import CausalLM
from worker.progress import Progress
from worker.sequence import SamplingParams, Sequence, token_array
from worker.setup import Setup
from worker.shared_prefixes import MIN_BYTES_SAVED, PrefixGrouping
from worker.step_input import HostInputBuilder, InputBuilder

if TYPE_CHECKING:
    from worker.step_graphs import StepGraphs


def input_builder(setup: Setup, cache: KVCache, device: torch.device) -> InputBuilder:
    """What builds the steps' tensors on this device."""
    if device.type == "cuda":
        from kernels.gpu.launch import num_multiprocessors  # needs Triton, which a CPU does without
        from worker.gpu_input import GpuInputBuilder

        max_blocks = -(-setup.max_model_len // cache.block_size)
        grouping = prefix_grouping(cache, device) if setup.config.shared_prefix_attention else None
        parts = max(1, num_multiprocessors(device) // cache.query_heads)
        return GpuInputBuilder(setup.max_num_seqs, max_blocks, cache.block_size, device, grouping, parts)
    tile = key_tile(setup.dtype, device, cache.block_size)
    return HostInputBuilder(setup.max_num_seqs, cache.block_size, tile, device)


def prefix_grouping(cache: KVCache, device: torch.device) -> PrefixGrouping:
    """What finds sequences that share prefixes, whose keys are cut into as many parts as the GPU computes at once."""
    from kernels.gpu.decode_attention import num_shares

    keys, _ = cache.layer(0)
    bytes_per_token = 2 * keys[0, 0].numel() * keys.element_size()
    return PrefixGrouping(cache.block_size, num_shares(keys.shape[2], device), MIN_BYTES_SAVED // bytes_per_token)


def replays_graphs(config: WorkerConfig, device: torch.device) -> bool:
    """Whether steps are captured: not where the host takes part, to sum over ranks."""
    alone = config.tensor_parallel_size == 1
    return device.type == "cuda" and alone and not config.enforce_eager


def capture_graphs(model: CausalLM, cache: KVCache, inputs: InputBuilder, setup: Setup) -> "StepGraphs":
    """Captures all steps that are worth it; shows how far it is."""
    from worker.gpu_input import GpuInputBuilder
    from worker.step_graphs import GraphSizes, StepGraphs

    assert isinstance(inputs, GpuInputBuilder)
    sizes = GraphSizes.of(setup.max_num_seqs, setup.max_num_batched_tokens, inputs.grouping is not None)
    graphs = StepGraphs(model, cache, inputs, sizes)
    progress = Progress("capturing CUDA graphs", "graphs")
    graphs.capture(progress.update)
    progress.close()
    return graphs


def warm_up(engine: Engine, prompt_tokens: int) -> None:
    """Runs one full prompt and a few decodes, so that the first request pays for no lazy set-up, and forgets them."""
    prompt = token_array()
    prompt.extend([0] * max(1, prompt_tokens))
    engine.add(Sequence("warm-up", prompt, SamplingParams(temperature=0.0), max_tokens=2))
    while engine.has_unfinished:
        engine.step()
    engine.scheduler.pool.clear_cache()

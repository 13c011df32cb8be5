"""How many KV blocks a worker has: those that a setting names, or as many as there is memory for."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from worker.assembly import input_builder, replays_graphs
from worker.config import ConfigError
from worker.kv_cache import KVCache, bytes_per_block
from worker.model_config import ModelConfig
from worker.models import CausalLM
from worker.parallel.shards import ALONE, Parallel
from worker.setup import Setup
from worker.speculation.loading import Draft
from worker.speculation.speculator import most_samples

if TYPE_CHECKING:
    from worker.memory_profile import MemoryProfile

logger = logging.getLogger(__name__)

_CPU_KV_CACHE_BYTES = 512 * 1024 * 1024


def fitting_blocks(
    setup: Setup, model: CausalLM, model_config: ModelConfig, parallel: Parallel = ALONE, draft: Draft | None = None
) -> tuple[int, str]:
    """How many KV blocks there is room for on this rank, with as many of a draft model, and the setting that says so.

    Raises ConfigError when a GPU has no room for a single step.
    """
    config = setup.config
    per_block = bytes_per_block(model_config, config.block_size, setup.kv_cache_dtype, parallel)
    per_block += draft.bytes_per_block if draft else 0
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, "--num-gpu-blocks-override"
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // per_block, "--kv-cache-memory-bytes"
    if setup.device.type == "cpu":
        return _CPU_KV_CACHE_BYTES // per_block, "the cpu's default of 512 MiB (--kv-cache-memory-bytes)"
    profile = _profile_memory(setup, model, model_config, parallel)
    if draft is not None:
        own = _profile_memory(draft.setup, draft.model, draft.checkpoint.config, ALONE)
        profile = replace(profile, steps=profile.steps + own.steps, graphs=profile.graphs + own.graphs)
    share = config.gpu_memory_utilization
    sum_up = profile.describe(share)
    logger.info("memory: %s", sum_up)
    return max(0, profile.left(share)) // per_block, f"--gpu-memory-utilization {share} ({sum_up})"


def _profile_memory(setup: Setup, model: CausalLM, model_config: ModelConfig, parallel: Parallel) -> "MemoryProfile":
    from worker.gpu_input import GpuInputBuilder
    from worker.memory_profile import largest_step, profile_memory

    config, device = setup.config, setup.device
    logger.info("measuring the memory of the largest step, of %d tokens", setup.max_num_batched_tokens)
    samples = most_samples(setup.max_num_seqs) if config.speculative_config is not None else 0
    plan = largest_step(
        setup.max_num_seqs, setup.max_num_batched_tokens, setup.max_model_len, config.block_size, samples
    )

    def make_cache(blocks: int) -> KVCache:
        return KVCache(model_config, blocks, config.block_size, setup.kv_cache_dtype, device, parallel)

    def make_inputs(cache: KVCache) -> GpuInputBuilder:
        made = input_builder(setup, cache, device)
        assert isinstance(made, GpuInputBuilder)
        return made

    graphs = replays_graphs(config, device)
    try:
        return profile_memory(model, plan, model_config.vocab_size, make_cache, make_inputs, graphs, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of --max-num-batched-tokens {setup.max_num_batched_tokens} for --max-num-seqs "
            f"{setup.max_num_seqs} does not fit beside the weights on {device}; lower them, or use a quantized model "
            f"or a larger --tensor-parallel-size ({error})"
        ) from error


def check_blocks(blocks: int, source: str, per_block: int, block_size: int, max_model_len: int) -> None:
    """Raises ConfigError when one sequence of ``max_model_len`` does not fit into the blocks that ``source`` gave."""
    needed = -(-max_model_len // block_size)
    if blocks < needed:
        advice = f"lower --max-model-len to {blocks * block_size} or raise the size" if blocks else "raise the size"
        raise ConfigError(
            f"{source} gives {blocks} KV blocks of {block_size} tokens, but one sequence of --max-model-len "
            f"{max_model_len} needs {needed} ({needed * per_block / 2**20:.0f} MiB); {advice}"
        )

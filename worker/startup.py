"""Turns settings into a ready engine: device, dtype, weights, KV cache. Every slow phase reports its progress."""

import logging
import sys
import time

import torch
from tqdm import tqdm

from worker.block_pool import BlockPool
from worker.config import ConfigError, WorkerConfig
from worker.engine import Engine, EngineLimits
from worker.kv_cache import KVCache, bytes_per_block
from worker.loader import open_checkpoint
from worker.loader.checkpoint import Checkpoint, manifest_hash
from worker.loader.weights import fill_randomly, load_weights
from worker.model_config import ModelConfig
from worker.model_runner import ModelRunner
from worker.models import CausalLM, build_model
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams, Sequence, token_array

logger = logging.getLogger(__name__)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}
_CPU_KV_CACHE_BYTES = 512 * 1024 * 1024


def build_engine(config: WorkerConfig) -> tuple[Engine, EngineLimits]:
    """Loads the model and builds an engine that has run its first step.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        CheckpointError, UnsupportedModel: the model cannot be served.
    """
    started = time.monotonic()
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    checkpoint = open_checkpoint(config.model)
    model_config = checkpoint.config
    max_model_len = config.max_model_len or model_config.max_position
    if max_model_len > model_config.max_position:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, but {checkpoint.name} knows {model_config.max_position} positions"
        )
    on_cpu = device.type == "cpu"
    max_num_seqs = config.max_num_seqs or (64 if on_cpu else 256)
    max_num_batched_tokens = max(config.max_num_batched_tokens or (512 if on_cpu else 8192), max_num_seqs)

    logger.info("model %s (%s), %s on %s", checkpoint.name, model_config.architecture, _dtype_name(dtype), device)
    model, manifest = load_model(config, checkpoint, max_model_len, dtype, device)
    num_blocks = count_blocks(config, model_config, max_model_len, dtype, device)
    cache = KVCache(model_config, num_blocks, config.block_size, dtype, device)
    size = num_blocks * bytes_per_block(model_config, config.block_size, dtype) / 2**20
    logger.info("KV cache: %d blocks of %d tokens, %.0f MiB", num_blocks, config.block_size, size)

    scheduler = Scheduler(
        BlockPool(num_blocks, config.enable_prefix_caching),
        config.block_size,
        max_num_seqs,
        max_num_batched_tokens,
        config.long_prefill_token_threshold,
    )
    runner = ModelRunner(model, cache, max_num_seqs, model_config.vocab_size, device)
    async_scheduling = not on_cpu if config.async_scheduling is None else config.async_scheduling
    engine = Engine(scheduler, runner, async_scheduling)
    _warm_up(engine, min(max_num_batched_tokens, max_model_len - 1))
    logger.info("engine ready after %.1f s", time.monotonic() - started)
    limits = EngineLimits(
        model=checkpoint.name,
        manifest_hash=manifest,
        vocab_size=model_config.vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return engine, limits


def resolve_device(name: str) -> torch.device:
    """The device of a --device flag. Raises ConfigError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is no device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices; use --device cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a --dtype flag; auto is bfloat16 where the processor computes with it, else float32."""
    if name != "auto":
        return _DTYPES[name]
    fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def load_model(
    config: WorkerConfig, checkpoint: Checkpoint, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[CausalLM, str]:
    """The model with its weights on the device, and the hash of its manifest."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = build_model(checkpoint.config, max_model_len)
    finally:
        torch.set_default_dtype(default)
    if config.load_format == "dummy":
        fill_randomly(model, config.seed)
        return model, manifest_hash(checkpoint.config, {})
    progress = LoadProgress("loading weights")
    load_weights(model, checkpoint, progress.update)
    progress.close()
    return model, manifest_hash(checkpoint.config, checkpoint.shapes())


def count_blocks(
    config: WorkerConfig, model: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> int:
    """How many KV blocks to have. Raises ConfigError when one sequence of ``max_model_len`` would not fit."""
    per_block = bytes_per_block(model, config.block_size, dtype)
    if config.num_gpu_blocks_override is not None:
        blocks, source = config.num_gpu_blocks_override, "--num-gpu-blocks-override"
    elif config.kv_cache_memory_bytes is not None:
        blocks, source = config.kv_cache_memory_bytes // per_block, "--kv-cache-memory-bytes"
    elif device.type == "cpu":
        blocks, source = _CPU_KV_CACHE_BYTES // per_block, "the cpu's default of 512 MiB (--kv-cache-memory-bytes)"
    else:
        free, total = torch.cuda.mem_get_info(device)
        # What this process may still take of its share; a tenth of it is left to activations.
        budget = 0.9 * (free - (1 - config.gpu_memory_utilization) * total)
        blocks, source = max(0, int(budget)) // per_block, "--gpu-memory-utilization"
    needed = -(-max_model_len // config.block_size)
    if blocks < needed:
        raise ConfigError(
            f"{source} gives {blocks} KV blocks of {config.block_size} tokens, but one sequence of --max-model-len "
            f"{max_model_len} needs {needed} ({needed * per_block / 2**20:.0f} MiB); "
            f"lower --max-model-len to {blocks * config.block_size} or raise the size"
        )
    return blocks


class LoadProgress:
    """A progress bar on a terminal, a line for each tenth elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: tqdm[None] | None = tqdm(desc=what, unit=" tensors", leave=False) if sys.stderr.isatty() else None
        self._tenth = 0

    def update(self, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` are through."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
        elif done * 10 // total > self._tenth:
            self._tenth = done * 10 // total
            logger.info("%s %3d%%", self._what, self._tenth * 10)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _warm_up(engine: Engine, prompt_tokens: int) -> None:
    """Runs one full prompt and a few decodes, so that the first request pays for no lazy set-up, and forgets them."""
    logger.info("warming up")
    prompt = token_array()
    prompt.extend([0] * max(1, prompt_tokens))
    engine.add(Sequence("warm-up", prompt, SamplingParams(temperature=0.0), max_tokens=2))
    while engine.has_unfinished:
        engine.step()
    engine.scheduler.pool.clear_cache()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

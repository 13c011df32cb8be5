"""Turns settings into a ready engine: device, dtype, weights, KV cache. Every slow phase reports its progress."""

import logging
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from kernels.attention import key_tile
from kernels.float8 import has_float8
from worker.block_pool import BlockPool
from worker.config import ConfigError, WorkerConfig
from worker.engine import Engine, EngineLimits, Runner
from worker.kv_cache import KVCache, bytes_per_block
from worker.loader import open_checkpoint
from worker.loader.checkpoint import Checkpoint, manifest_hash
from worker.loader.weights import fill_randomly, load_weights
from worker.model_config import ModelConfig
from worker.model_runner import ModelRunner
from worker.models import CausalLM, build_model
from worker.parallel.group import group_joined, leave_group
from worker.parallel.ranks import Ranks
from worker.parallel.runners import LeaderRunner
from worker.parallel.shards import ALONE, Parallel, check_degree
from worker.quantization import choose_quantization
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams, Sequence, token_array
from worker.speculation.draft_model import ModelDrafter
from worker.speculation.ngram import NgramDrafter
from worker.speculation.speculator import Drafter, Speculator, most_samples
from worker.step_input import HostInputBuilder, InputBuilder
from worker.vocabulary import VocabularyError

if TYPE_CHECKING:
    from worker.decode_graphs import DecodeGraphs
    from worker.memory_profile import MemoryProfile

logger = logging.getLogger(__name__)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}
_CPU_KV_CACHE_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True)
class Setup:
    """The settings, every default that depends on the model or the machine filled in."""

    config: WorkerConfig
    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def for_rank(self, rank: int) -> WorkerConfig:
        """The settings of one rank, from which it comes to the same setup."""
        return replace(
            self.config,
            device=f"cuda:{rank}" if self.device.type == "cuda" else "cpu",
            dtype=_dtype_name(self.dtype),
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tensor_parallel_size=1,
            speculative_config=None,  # the leader's alone
        )


def build_engine(config: WorkerConfig, checkpoint: Checkpoint | None = None) -> tuple[Engine, EngineLimits]:
    """Loads the model and builds an engine that has run its first step. The engine is to be closed in the end.

    Args:
        config: the settings.
        checkpoint: the model, when it was opened already.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        CheckpointError, UnsupportedModel: the model cannot be served.
        RankFailed: a rank ended meanwhile.
    """
    started = time.monotonic()
    checkpoint = checkpoint or open_checkpoint(config.model)
    setup = resolve(config, checkpoint)
    size = config.tensor_parallel_size
    architecture, dtype = checkpoint.config.architecture, _dtype_name(setup.dtype)
    ranks_text = f", {size} ranks" if size > 1 else ""
    quantization = _model_config(config, checkpoint).quantization
    form = f"{dtype}, weights {quantization.method}" if quantization else dtype
    logger.info("model %s (%s), %s on %s%s", checkpoint.name, architecture, form, setup.device, ranks_text)
    if size == 1:
        built = _build(setup, checkpoint, None)
    else:
        check_degree(checkpoint.config, size)
        if group_joined():
            raise ConfigError(
                f"--tensor-parallel-size is {size}, but this process already has an engine of several ranks, or uses "
                "torch.distributed for something else; close that first"
            )
        ranks = _start_ranks(setup)
        try:
            built = _build(setup, checkpoint, ranks)
        except BaseException:
            ranks.close()
            leave_group()
            raise
    logger.info("engine ready after %.1f s", time.monotonic() - started)
    return built


def resolve(config: WorkerConfig, checkpoint: Checkpoint) -> Setup:
    """Fills in the defaults that depend on the model or the machine. Raises ConfigError when a setting fits neither."""
    _model_config(config, checkpoint)  # a --quantization that does not fit is refused before anything is built
    device = resolve_device(config.device, config.tensor_parallel_size)
    longest = checkpoint.config.max_position
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ConfigError(f"--max-model-len is {max_model_len}, but {checkpoint.name} knows {longest} positions")
    on_cpu = device.type == "cpu"
    max_num_seqs = config.max_num_seqs or (64 if on_cpu else 256)
    max_num_batched_tokens = max(config.max_num_batched_tokens or (512 if on_cpu else 8192), max_num_seqs)
    dtype = resolve_dtype(config.dtype, device)
    kv_cache_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, dtype, device)
    return Setup(config, device, dtype, kv_cache_dtype, max_model_len, max_num_seqs, max_num_batched_tokens)


def _start_ranks(setup: Setup) -> Ranks:
    """Starts the other ranks; this process takes its own share of the cores, or the first GPU."""
    size = setup.config.tensor_parallel_size
    threads = None
    if setup.device.type == "cpu":
        threads = max(1, torch.get_num_threads() // size)
        torch.set_num_threads(threads)
    return Ranks(size, threads)


def _build(setup: Setup, checkpoint: Checkpoint, ranks: Ranks | None) -> tuple[Engine, EngineLimits]:
    config, model_config, device = setup.config, checkpoint.config, setup.device
    parallel = ALONE
    if ranks is not None:
        ranks.configure([setup.for_rank(rank) for rank in range(1, ranks.size)])
        parallel = ranks.join(device)
    model, manifest = load_model(config, checkpoint, setup.max_model_len, setup.dtype, device, parallel)
    draft = _load_draft(setup, checkpoint)
    num_blocks, source = fitting_blocks(setup, model, model_config, parallel, draft)
    if ranks is not None:
        # Every rank holds its share of every block: the one with the least memory decides.
        num_blocks = min(num_blocks, *(values["num_blocks"] for values in ranks.gather()))
        if device.type == "cpu":
            ranks.forget_store()
    per_block = bytes_per_block(model_config, config.block_size, setup.kv_cache_dtype, parallel)
    check_blocks(
        num_blocks, source, per_block + (draft.bytes_per_block if draft else 0), config.block_size, setup.max_model_len
    )
    cache = KVCache(model_config, num_blocks, config.block_size, setup.kv_cache_dtype, device, parallel)
    size = num_blocks * per_block / 2**20
    each = " each" if parallel.size > 1 else ""
    logger.info(
        "KV cache: %d blocks of %d tokens in %s, %.0f MiB%s",
        *(num_blocks, config.block_size, _dtype_name(setup.kv_cache_dtype), size, each),
    )

    scheduler = Scheduler(
        BlockPool(num_blocks, config.enable_prefix_caching),
        config.block_size,
        setup.max_num_seqs,
        setup.max_num_batched_tokens,
        config.long_prefill_token_threshold,
        config.max_num_prefill_tokens_with_decodes,
        _speculator(setup, draft, num_blocks, model_config.vocab_size),
    )
    inputs = input_builder(setup, cache, device)
    graphs = None
    if replays_graphs(config, device):
        graphs = _capture_graphs(model, cache, inputs, setup.max_num_seqs)
    own_runner = ModelRunner(model, cache, inputs, setup.max_num_seqs, model_config.vocab_size, device, graphs)
    runner: Runner = own_runner
    if ranks is not None:
        ranks.tell(num_blocks=num_blocks)
        ranks.gather()
        runner = LeaderRunner(own_runner, ranks, parallel)
    async_scheduling = device.type != "cpu" if config.async_scheduling is None else config.async_scheduling
    engine = Engine(scheduler, runner, async_scheduling)
    _warm_up(engine, min(setup.max_num_batched_tokens, setup.max_model_len - 1))
    limits = EngineLimits(
        model=checkpoint.name,
        manifest_hash=manifest,
        vocab_size=model_config.vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        takes_priorities=config.scheduling_policy == "priority",
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return engine, limits


@dataclass(frozen=True)
class _Draft:
    """A draft model with its weights on the leader's device, and the setup under which it runs there, whole."""

    checkpoint: Checkpoint
    model: CausalLM
    setup: Setup

    @property
    def bytes_per_block(self) -> int:
        """Of its keys and values; there is one such block beside each of the target's."""
        return bytes_per_block(self.checkpoint.config, self.setup.config.block_size, self.setup.kv_cache_dtype)


def _load_draft(setup: Setup, target: Checkpoint) -> _Draft | None:
    """The draft model, if one is wanted. Raises ConfigError when it does not belong to the target."""
    wanted = setup.config.speculative_config
    if wanted is None or wanted.model is None:
        return None
    if not wanted.model.exists():
        raise ConfigError(f"--speculative-config: model {wanted.model} is not there; give a folder or a .gguf file")
    checkpoint = open_checkpoint(wanted.model)
    if not _same_vocabulary(checkpoint, target):
        raise ConfigError(
            f"--speculative-config: {checkpoint.name} and {target.name} do not have the same tokens; take a draft "
            "model of the same family"
        )
    max_model_len = min(setup.max_model_len, checkpoint.config.max_position)
    config = replace(setup.config, model=wanted.model, quantization=None, speculative_config=None)
    config = replace(config, tensor_parallel_size=1)
    logger.info("draft model %s (%s)", checkpoint.name, checkpoint.config.architecture)
    model, _ = load_model(config, checkpoint, max_model_len, setup.dtype, setup.device)
    return _Draft(checkpoint, model, replace(setup, config=config, max_model_len=max_model_len))


def _same_vocabulary(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether ids stand for the same tokens; models may be padded to different sizes. By size, if no one can tell."""
    try:
        tokens, others = one.vocabulary().tokens, other.vocabulary().tokens
    except VocabularyError:
        return one.config.vocab_size == other.config.vocab_size
    shared = min(len(tokens), len(others))
    return tokens[:shared] == others[:shared] and not any(tokens[shared:]) and not any(others[shared:])


def _speculator(setup: Setup, draft: _Draft | None, num_blocks: int, vocab_size: int) -> Speculator | None:
    wanted = setup.config.speculative_config
    if wanted is None:
        return None
    drafter: Drafter = NgramDrafter(wanted.prompt_lookup_max, wanted.prompt_lookup_min)
    if draft is not None:
        drafter = ModelDrafter(_draft_engine(draft, num_blocks), draft.setup.max_model_len, vocab_size)
    return Speculator(drafter, wanted.num_speculative_tokens)


def _draft_engine(draft: _Draft, num_blocks: int) -> Engine:
    """An engine with as many blocks as the target has: what one has cached, the other then has, by and large."""
    setup, model = draft.setup, draft.checkpoint.config
    block_size, rows = setup.config.block_size, setup.max_num_seqs
    cache = KVCache(model, num_blocks, block_size, setup.kv_cache_dtype, setup.device)
    inputs = input_builder(setup, cache, setup.device)
    graphs = None
    if replays_graphs(setup.config, setup.device):
        graphs = _capture_graphs(draft.model, cache, inputs, rows)
    runner = ModelRunner(draft.model, cache, inputs, rows, model.vocab_size, setup.device, graphs)
    engine = Engine(Scheduler(BlockPool(num_blocks), block_size, rows, setup.max_num_batched_tokens), runner)
    _warm_up(engine, min(setup.max_num_batched_tokens, setup.max_model_len - 1))
    return engine


def input_builder(setup: Setup, cache: KVCache, device: torch.device) -> InputBuilder:
    """What builds the steps' tensors on this device."""
    if device.type == "cuda":
        from worker.gpu_input import GpuInputBuilder  # needs Triton, which a CPU does without

        max_blocks = -(-setup.max_model_len // cache.block_size)
        return GpuInputBuilder(setup.max_num_seqs, max_blocks, cache.block_size, device)
    tile = key_tile(setup.dtype, device, cache.block_size)
    return HostInputBuilder(setup.max_num_seqs, cache.block_size, tile, device)


def replays_graphs(config: WorkerConfig, device: torch.device) -> bool:
    """Whether decode steps are captured: not where the host takes part, to sum over ranks."""
    alone = config.tensor_parallel_size == 1
    return device.type == "cuda" and alone and not config.enforce_eager


def _capture_graphs(model: CausalLM, cache: KVCache, inputs: InputBuilder, max_num_seqs: int) -> "DecodeGraphs":
    from worker.decode_graphs import DecodeGraphs, graph_sizes
    from worker.gpu_input import GpuInputBuilder

    assert isinstance(inputs, GpuInputBuilder)
    graphs = DecodeGraphs(model, cache, inputs, graph_sizes(max_num_seqs))
    progress = Progress("capturing CUDA graphs", "graphs")
    graphs.capture(progress.update)
    progress.close()
    return graphs


def resolve_device(name: str, ranks: int = 1) -> torch.device:
    """The device of a --device flag, of rank 0 when there are several. Raises ConfigError when it is not there."""
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
    if device.type == "cuda" and ranks > 1:
        if ":" in name:
            raise ConfigError(f"--device {name} names one GPU, but every rank needs one of its own; use cuda")
        if ranks > torch.cuda.device_count():
            raise ConfigError(
                f"--tensor-parallel-size is {ranks}, but torch sees {torch.cuda.device_count()} CUDA devices and every "
                "rank needs one of its own; lower it, or give --device cpu"
            )
        return torch.device("cuda:0")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a --dtype flag; auto is bfloat16 where the processor computes with it, else float32."""
    if name != "auto":
        return _DTYPES[name]
    fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def resolve_kv_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a --kv-cache-dtype flag, for a model of ``dtype``. Raises ConfigError when the GPU has no such."""
    if name == "auto":
        return dtype
    if device.type == "cuda" and not has_float8(device):
        raise ConfigError(f"--kv-cache-dtype {name} needs a GPU of compute capability 8.9 or newer; use auto")
    return torch.float8_e4m3fn


def load_model(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel = ALONE,
) -> tuple[CausalLM, str]:
    """A rank's share of the model with its weights on the device, and the hash of the whole model's manifest."""
    model_config = _model_config(config, checkpoint)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = build_model(model_config, max_model_len, parallel)
    finally:
        torch.set_default_dtype(default)
    if config.load_format == "dummy":
        fill_randomly(model, config.seed)
        return model, manifest_hash(model_config, {})
    if parallel.rank > 0:
        load_weights(model, checkpoint)
    else:
        progress = Progress("loading weights", "tensors")
        load_weights(model, checkpoint, progress.update)
        progress.close()
    return model, manifest_hash(model_config, checkpoint.entries)


def _model_config(config: WorkerConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The checkpoint's configuration with what --quantization adds to it. Raises ConfigError when they do not fit."""
    model = checkpoint.config
    found = choose_quantization(config.quantization, model.quantization, checkpoint.name, model.experts is not None)
    return replace(model, quantization=found)


def fitting_blocks(
    setup: Setup, model: CausalLM, model_config: ModelConfig, parallel: Parallel = ALONE, draft: _Draft | None = None
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


class Progress:
    """A progress bar on a terminal, a line for each tenth elsewhere."""

    def __init__(self, what: str, unit: str) -> None:
        self._what = what
        self._bar: tqdm[None] | None = tqdm(desc=what, unit=" " + unit, leave=False) if sys.stderr.isatty() else None
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

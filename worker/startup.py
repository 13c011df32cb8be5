"""Turns settings into a ready engine: the order in which weights, KV cache, runner and drafts come to be."""

import logging

import torch

from worker.assembly import capture_graphs, input_builder, replays_graphs, warm_up
from worker.block_pool import BlockPool
from worker.cache_size import check_blocks, fitting_blocks
from worker.config import ConfigError, WorkerConfig
from worker.engine import Engine, EngineLimits, Runner
from worker.kv_cache import KVCache, bytes_per_block
from worker.loader import open_checkpoint
from worker.loader.checkpoint import Checkpoint
from worker.model_loading import load_model
from worker.model_runner import ModelRunner
from worker.parallel.group import group_joined, leave_group
from worker.parallel.ranks import Ranks
from worker.parallel.runners import LeaderRunner
from worker.parallel.shards import ALONE, check_degree
from worker.phases import StartPhases
from worker.scheduler import Scheduler
from worker.setup import Setup, dtype_name, quantized_config, resolve
from worker.speculation.loading import load_draft, make_speculator

logger = logging.getLogger(__name__)


def build_engine(
    config: WorkerConfig, checkpoint: Checkpoint | None = None, phases: StartPhases | None = None
) -> tuple[Engine, EngineLimits]:
    """Loads the model and builds an engine that has run its first step. The engine is to be closed in the end.

    Args:
        config: the settings.
        checkpoint: the model, when it was opened already.
        phases: is told how long each took.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        CheckpointError, UnsupportedModel: the model cannot be served.
        RankFailed: a rank ended meanwhile.
    """
    phases = phases or StartPhases()
    checkpoint = checkpoint or open_checkpoint(config.model)
    with phases.phase("device"):
        setup = resolve(config, checkpoint)
        torch.empty(1, device=setup.device)  # sets up CUDA, which would else be counted to what comes next
    size = config.tensor_parallel_size
    architecture, dtype = checkpoint.config.architecture, dtype_name(setup.dtype)
    ranks_text = f", {size} ranks" if size > 1 else ""
    quantization = quantized_config(config, checkpoint).quantization
    form = f"{dtype}, weights {quantization.method}" if quantization else dtype
    logger.info("model %s (%s), %s on %s%s", checkpoint.name, architecture, form, setup.device, ranks_text)
    if size == 1:
        built = _build(setup, checkpoint, None, phases)
    else:
        check_degree(checkpoint.config, size)
        if group_joined():
            raise ConfigError(
                f"--tensor-parallel-size is {size}, but this process already has an engine of several ranks, or uses "
                "torch.distributed for something else; close that first"
            )
        with phases.phase("ranks"):
            ranks = _start_ranks(setup)
        try:
            built = _build(setup, checkpoint, ranks, phases)
        except BaseException:
            ranks.close()
            leave_group()
            raise
    logger.info("engine ready after %.1f s: %s", phases.elapsed, phases.describe())
    return built


def _start_ranks(setup: Setup) -> Ranks:
    """Starts the other ranks; this process takes its own share of the cores, or the first GPU."""
    size = setup.config.tensor_parallel_size
    threads = None
    if setup.device.type == "cpu":
        threads = max(1, torch.get_num_threads() // size)
        torch.set_num_threads(threads)
    return Ranks(size, threads)


def _build(
    setup: Setup, checkpoint: Checkpoint, ranks: Ranks | None, phases: StartPhases
) -> tuple[Engine, EngineLimits]:
    config, model_config, device = setup.config, checkpoint.config, setup.device
    parallel = ALONE
    if ranks is not None:
        with phases.phase("ranks"):
            ranks.configure([setup.for_rank(rank) for rank in range(1, ranks.size)])
            parallel = ranks.join(device)
    with phases.phase("random weights" if config.load_format == "dummy" else "weights"):
        model, manifest = load_model(config, checkpoint, setup.max_model_len, setup.dtype, device, parallel)
        draft = load_draft(setup, checkpoint)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with phases.phase("memory profile"):
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
    with phases.phase("KV cache"):
        cache = KVCache(model_config, num_blocks, config.block_size, setup.kv_cache_dtype, device, parallel)
    size = num_blocks * per_block / 2**20
    each = " each" if parallel.size > 1 else ""
    logger.info(
        "KV cache: %d blocks of %d tokens in %s, %.0f MiB%s",
        *(num_blocks, config.block_size, dtype_name(setup.kv_cache_dtype), size, each),
    )

    with phases.phase("drafts"):
        speculator = make_speculator(setup, draft, num_blocks, model_config.vocab_size)
    scheduler = Scheduler(
        BlockPool(num_blocks, config.enable_prefix_caching),
        config.block_size,
        setup.max_num_seqs,
        setup.max_num_batched_tokens,
        config.long_prefill_token_threshold,
        setup.max_num_prefill_tokens_with_decodes,
        speculator,
    )
    inputs = input_builder(setup, cache, device)
    graphs = None
    if replays_graphs(config, device):
        with phases.phase("CUDA graphs"):
            graphs = capture_graphs(model, cache, inputs, setup)
    own_runner = ModelRunner(model, cache, inputs, setup.max_num_seqs, model_config.vocab_size, device, graphs)
    runner: Runner = own_runner
    if ranks is not None:
        ranks.tell(num_blocks=num_blocks)
        ranks.gather()
        runner = LeaderRunner(own_runner, ranks, parallel)
    async_scheduling = device.type != "cpu" if config.async_scheduling is None else config.async_scheduling
    engine = Engine(scheduler, runner, async_scheduling)
    with phases.phase("warm-up"):
        warm_up(engine, min(setup.max_num_batched_tokens, setup.max_model_len - 1))
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

"""The step whose memory is measured: as large as the limits allow, and one that the model runner takes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tests.doubles.tiny_model import save_tiny
from worker.assembly import input_builder
from worker.cache_size import fitting_blocks
from worker.config import WorkerConfig
from worker.kv_cache import KVCache, bytes_per_block
from worker.loader import open_checkpoint
from worker.memory_profile import MemoryProfile, largest_step
from worker.model_config import ModelConfig
from worker.model_loading import load_model
from worker.model_runner import ModelRunner
from worker.setup import resolve
from worker.speculation.loading import Draft

GIB = 2**30


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "tokens"),
    [(4, 64, 128, 64), (3, 64, 128, 64), (8, 8, 128, 8), (2, 512, 100, 200), (1, 30, 40, 30), (7, 8, 128, 8)],
)
def test_largest_step_fills_the_limits(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, tokens: int
) -> None:
    plan = largest_step(max_num_seqs, max_num_batched_tokens, max_model_len, 16)
    assert len(plan.rows) == len(plan.samples) == max_num_seqs
    assert sum(plan.counts) == len(plan.token_ids) == tokens
    assert max(plan.counts) <= max_model_len
    # Those with a single token come first, and nobody shares a block.
    assert plan.counts == sorted(plan.counts)
    blocks = [block for table in plan.block_tables for block in table]
    assert blocks == list(range(len(blocks)))
    assert all(len(table) == -(-count // 16) for table, count in zip(plan.block_tables, plan.counts, strict=True))


@pytest.mark.parametrize("samples", [0, 64])
def test_runner_takes_the_largest_step(tmp_path: Path, samples: int) -> None:
    save_tiny(tmp_path / "tiny")
    config = WorkerConfig(tmp_path / "tiny", device="cpu", max_num_seqs=5, max_num_batched_tokens=64, max_model_len=48)
    checkpoint = open_checkpoint(config.model)
    setup = resolve(config, checkpoint)
    model, _ = load_model(config, checkpoint, setup.max_model_len, setup.dtype, setup.device)
    plan = largest_step(5, 64, 48, config.block_size, samples)
    blocks = sum(len(table) for table in plan.block_tables)
    cache = KVCache(checkpoint.config, blocks, config.block_size, setup.dtype, setup.device)
    inputs = input_builder(setup, cache, setup.device)
    runner = ModelRunner(model, cache, inputs, 5, checkpoint.config.vocab_size, setup.device)
    sampled = runner.launch(plan).sampled()
    assert len(sampled.ids) == max(5, samples)
    assert all(row is not None and len(row.top_ids) == 20 for row in sampled.logprobs)


def test_what_is_left_is_the_share_less_all_needs() -> None:
    profile = MemoryProfile(total=100 * GIB, taken=20 * GIB, steps=3 * GIB, graphs=1 * GIB)
    assert profile.left(0.92) == 68 * GIB - 256 * 2**20
    assert profile.left(0.2) < 0
    assert profile.describe(0.92) == (
        "92.0 GiB of 100.0, less 20.0 for weights and CUDA, 3.00 for steps, 1.00 for graphs"
    )


def test_a_draft_model_s_steps_graphs_and_blocks_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 GiB left, 2 go to the draft model's steps and graphs, and its blocks are half as large as the target's."""
    save_tiny(tmp_path, num_hidden_layers=4)
    target, small = open_checkpoint(tmp_path), replace(open_checkpoint(tmp_path).config, num_layers=2)
    setup = replace(resolve(WorkerConfig(tmp_path, device="cpu"), target), device=torch.device("cuda"))
    model = load_model(WorkerConfig(tmp_path), target, 64, torch.float32, torch.device("cpu"))[0]
    draft = Draft(SimpleNamespace(config=small), model, setup)
    needs = {target.config: (2 * GIB, 1 * GIB), small: (GIB, GIB)}

    def profile(_setup: object, _model: object, config: ModelConfig, _parallel: object) -> MemoryProfile:
        return MemoryProfile(10 * GIB + 2**28, 2 * GIB, *needs[config])

    monkeypatch.setattr("worker.cache_size._profile_memory", profile)
    setup = replace(setup, config=replace(setup.config, gpu_memory_utilization=1.0))
    block = bytes_per_block(target.config, setup.config.block_size, setup.kv_cache_dtype)
    assert fitting_blocks(setup, model, target.config)[0] == 5 * GIB // block
    assert fitting_blocks(setup, model, target.config, draft=draft)[0] == 3 * GIB // (block * 3 // 2)

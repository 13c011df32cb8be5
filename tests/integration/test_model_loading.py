"""Model folders and files: what is there is loaded whole, and whatever does not fit is refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.doubles.tiny_model import VOCAB, save_tiny
from worker.config import ConfigError, WorkerConfig
from worker.loader import open_checkpoint
from worker.loader.checkpoint import CheckpointError, manifest_hash
from worker.model_config import UnsupportedModel
from worker.startup import build_engine


@pytest.fixture
def folder(tmp_path):
    save_tiny(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def everything(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.entries}


def test_sharded_folder_equals_single(tmp_path):
    model = save_tiny(tmp_path / "single")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single = everything(tmp_path / "single")
    sharded = everything(tmp_path / "sharded")
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_manifest_tells_models_apart(folder, tmp_path_factory):
    def manifest(path):
        checkpoint = open_checkpoint(path)
        return manifest_hash(checkpoint.config, checkpoint.entries)

    copy = tmp_path_factory.mktemp("copy") / "other-name"
    shutil.copytree(folder, copy)
    assert manifest(copy) == manifest(folder)
    change_config(copy, rms_norm_eps=1e-3)
    assert manifest(copy) != manifest(folder)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: change_config(f, architectures=["MambaForCausalLM"]), UnsupportedModel, "MambaForCausalLM.*Llama"),
        (lambda f: change_config(f, hidden_act="gelu"), UnsupportedModel, "gelu"),
        (lambda f: change_config(f, quantization_config={"quant_method": "gptq"}), UnsupportedModel, "gptq"),
        (
            lambda f: change_config(f, rope_parameters={"rope_type": "spiral", "factor": 2.0, "rope_theta": 1e4}),
            UnsupportedModel,
            "spiral",
        ),
        (lambda f: change_config(f, intermediate_size=64), CheckpointError, "_proj.weight has shape"),
        (
            lambda f: change_config(f, num_hidden_layers=3),
            CheckpointError,
            "lacks 9 tensors of the model, first model.layers.2",
        ),
        (lambda f: (f / "config.json").unlink(), CheckpointError, "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), CheckpointError, "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("{}"), CheckpointError, "config.json lacks"),
        (lambda f: (f / "config.json").write_text("[]"), CheckpointError, "holds a list; it must hold an object"),
        (lambda f: change_config(f, hidden_size="32"), CheckpointError, "hidden_size is '32'; it must be a positive"),
        (lambda f: change_config(f, num_hidden_layers=-4), CheckpointError, "num_hidden_layers is -4"),
        (lambda f: change_config(f, max_position_embeddings=None), CheckpointError, "max_position_embeddings is None"),
        (lambda f: change_config(f, sliding_window="x"), CheckpointError, "sliding_window is 'x'"),
        (lambda f: change_config(f, rms_norm_eps=None), CheckpointError, "rms_norm_eps is None"),
        (lambda f: change_config(f, architectures="LlamaForCausalLM"), CheckpointError, "must be a list of strings"),
        (
            lambda f: change_config(f, rope_parameters={"factor": "x"}),
            CheckpointError,
            "a value is not what it should be",
        ),
        (lambda f: (f / "model.safetensors").unlink(), CheckpointError, "no .*safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"garbage"), CheckpointError, "model.safetensors"),
        (lambda f: change_tensors(f, lambda t: t.pop("model.norm.weight")), CheckpointError, "model.norm.weight"),
        (
            lambda f: change_tensors(f, lambda t: t.update({"model.extra.weight": torch.zeros(1)})),
            CheckpointError,
            "model.extra.weight belongs to no part",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
            CheckpointError,
            "gone.safetensors",
        ),
    ],
)
def test_damaged_and_unsupported_models_are_refused_by_name(folder, damage, error, message):
    damage(folder)
    with pytest.raises(error, match=message):
        build_engine(WorkerConfig(model=folder, dtype="float32", kv_cache_memory_bytes=1 << 20))


def test_truncated_safetensors_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        build_engine(WorkerConfig(model=folder, dtype="float32", kv_cache_memory_bytes=1 << 20))


def test_no_model_and_no_gguf(tmp_path):
    with pytest.raises(CheckpointError, match="neither a model folder"):
        open_checkpoint(tmp_path / "nowhere")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"this is not the file you are looking for" * 10)
    with pytest.raises(CheckpointError, match="no readable GGUF file"):
        open_checkpoint(bad)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 257}, "--max-model-len is 257.*256"),
        ({"num_gpu_blocks_override": 3}, "--num-gpu-blocks-override gives 3 KV blocks.*needs 16.*48"),
        ({"kv_cache_memory_bytes": 10}, "--kv-cache-memory-bytes gives 0 KV blocks"),
        ({"device": "cuda:99"}, "--device cuda:99"),
        ({"device": "abacus"}, "--device abacus"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_what_to_change(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        build_engine(WorkerConfig(model=folder, dtype="float32", **settings))


def test_random_weights_need_no_weight_files(folder):
    (folder / "model.safetensors").unlink()
    config = WorkerConfig(model=folder, dtype="float32", load_format="dummy", kv_cache_memory_bytes=1 << 20)
    engine, limits = build_engine(config)
    assert limits.vocab_size == VOCAB
    assert engine.scheduler.pool.num_free == limits.num_blocks, "the warm-up left something behind"

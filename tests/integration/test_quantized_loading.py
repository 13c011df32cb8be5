"""Quantized checkpoints that do not fit, or are not supported, are refused by name, with nothing of them loaded."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.doubles.quantized_model import Tensors, change_quantization, write_awq, write_fp8, write_packed
from tests.doubles.tiny_model import save_tiny
from worker.config import ConfigError, WorkerConfig
from worker.loader import open_checkpoint
from worker.loader.checkpoint import CheckpointError, manifest_hash
from worker.loader.huggingface import HuggingFaceFolder
from worker.model_config import UnsupportedModel
from worker.models.sharding import Target
from worker.startup import build_engine

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
WRITERS = {"awq": write_awq, "packed": write_packed, "fp8": write_fp8}
UP = "model.layers.0.mlp.up_proj"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for name, write in {**WRITERS, "plain": lambda folder, model: None}.items():
        made[name] = tmp_path_factory.mktemp(name)
        write(made[name], save_tiny(made[name], **SIZES))
    return made


@pytest.fixture
def copy(folders, tmp_path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / name))


def build(folder: Path, **settings: object) -> None:
    build_engine(WorkerConfig(model=folder, device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 20, **settings))


def group(settings: dict) -> dict:
    return settings["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8", lambda q: q.update(quant_method="gptq"), r"by gptq; supported: fp8 .*awq .*pack-quantized"),
        ("fp8", lambda q: q.update(quant_method="bitsandbytes"), "by bitsandbytes"),
        ("fp8", lambda q: q.update(quant_method="fp8", weight_block_size=[128, 128]), "each block of 128 x 128"),
        ("awq", lambda q: q.update(bits=8), "by awq with 8 bits"),
        ("awq", lambda q: q.update(version="GEMV"), "by awq in the gemv layout"),
        ("awq", lambda q: q.update(zero_point=False), "by awq without zero points"),
        ("awq", lambda q: q.update(group_size=24), "in groups of 24 inputs"),
        ("fp8", lambda q: q["config_groups"].update(group_1={}), "with 2 groups of layers"),
        ("fp8", lambda q: q.update(sparsity_config={"format": "sparse-24"}), "sparse weights"),
        ("fp8", lambda q: q.update(transform_config={"config_groups": {"u": {}}}), "transforms"),
        ("fp8", lambda q: group(q).update(output_activations={"num_bits": 8}), "quantized outputs"),
        ("fp8", lambda q: group(q).update(input_activations=None), "activations that are not fp8"),
        ("fp8", lambda q: group(q)["input_activations"].update(type="int"), "activations that are not fp8"),
        ("fp8", lambda q: group(q)["input_activations"].update(strategy="group"), "activations scaled by group"),
        ("fp8", lambda q: group(q)["weights"].update(strategy="block"), "float-quantized .*scaled by block"),
        ("fp8", lambda q: group(q).update(format="int-quantized"), "int-quantized with 8-bit float"),
        ("fp8", lambda q: group(q)["weights"].update(type="int"), "with 8-bit int weights"),
        ("packed", lambda q: group(q)["weights"].update(num_bits=8), "pack-quantized with 8-bit int weights"),
        ("packed", lambda q: group(q)["weights"].update(actorder="group"), r"in activation order \(group\)"),
        ("packed", lambda q: group(q)["weights"].update(strategy="tensor"), "scaled by tensor"),
        ("packed", lambda q: group(q)["weights"].update(group_size=8), "in groups of 8 inputs"),
        ("packed", lambda q: group(q).update(input_activations={"num_bits": 8}), "and quantized activations"),
        ("packed", lambda q: group(q).update(targets=["re:*"]), r"names layers by 're:\*'"),
        ("packed", lambda q: q.update(ignore=["lm_head", QUERY]), r"q_proj is not quantized, k_proj is quantized"),
        ("packed", lambda q: group(q)["weights"].update(group_size=48), r"64 inputs are no multiple of .* 48"),
    ],
)
def test_other_kinds_are_refused_by_name(copy, name, change, message):
    folder = copy(name)
    change_quantization(folder, change)
    with pytest.raises(UnsupportedModel, match=message):
        build(folder)


def test_a_config_that_lacks_a_key_is_refused(copy):
    folder = copy("awq")
    change_quantization(folder, lambda q: q.pop("bits"))
    with pytest.raises(CheckpointError, match=r"config.json lacks 'bits'"):
        build(folder)


def test_quantized_experts_are_refused(tmp_path):
    save_tiny(tmp_path, "Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"MixtralForCausalLM with quantized weights \(fp8\)"):
        build(tmp_path)


def test_awq_needs_outputs_that_fill_its_words(copy):
    folder = copy("awq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 3, "head_dim": 12}))
    with pytest.raises(UnsupportedModel, match=r"q_proj.*36 outputs are no multiple of 8"):
        build(folder)


def test_ranks_that_would_cut_groups_too_small_are_refused(tmp_path):
    write_packed(tmp_path, save_tiny(tmp_path, hidden_size=64, intermediate_size=80), group=16)
    with pytest.raises((UnsupportedModel, RuntimeError), match=r"cut at input 40, leave groups of 8.*tensor-parallel"):
        build(tmp_path, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8", lambda t: t.pop(f"{UP}.weight_scale"), f"lacks 1 tensors of the model, first {UP}.weight_scale"),
        (
            "fp8",
            lambda t: t.update({f"{UP}.weight_scale": torch.ones(5)}),
            rf"{UP}.weight_scale has shape \(5,\), the model needs \(1,\)",
        ),
        (
            "fp8",
            lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].bfloat16()}),
            f"{UP}.weight is bfloat16, the model needs float8_e4m3fn",
        ),
        (
            "fp8",
            lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].float().to(torch.float8_e5m2)}),
            f"{UP}.weight is float8_e5m2",
        ),
        (
            "fp8",
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            "lm_head.weight is float8_e4m3fn, the model needs bfloat16 or",
        ),
        ("fp8", lambda t: t.update({"lm_head.weight_scale": torch.ones(1)}), "lm_head.weight_scale belongs to no part"),
        ("awq", lambda t: t.pop(f"{UP}.qzeros"), f"first {UP}.qzeros"),
        (
            "awq",
            lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"].T.contiguous()}),
            rf"{UP}.qweight has shape \(12, 64\), the model needs \(64, 12\)",
        ),
        ("awq", lambda t: t.update({f"{UP}.scales": torch.ones(1, 96)}), r"scales has shape \(1, 96\)"),
        ("awq", lambda t: t.update({f"{UP}.g_idx": torch.zeros(64)}), f"{UP}.g_idx belongs to no part"),
        ("packed", lambda t: t.pop(f"{UP}.weight_shape"), f"first {UP}.weight_shape"),
        (
            "packed",
            lambda t: t.update({f"{UP}.weight_shape": torch.tensor([96, 60])}),
            rf"{UP}.weight_shape holds \(96, 60\), the model needs \(96, 64\)",
        ),
        (
            "packed",
            lambda t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"].long()}),
            f"{UP}.weight_packed is int64, the model needs int32",
        ),
        ("plain", lambda t: t.update({f"{UP}.weight": torch.ones(96, 64).char()}), f"{UP}.weight is int8"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_before_any_is_loaded(copy, monkeypatch, name, change, message):
    folder = copy(name)
    tensors: Tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    loaded = []
    monkeypatch.setattr(Target, "fill", lambda self, tensor: loaded.append(tensor))
    with pytest.raises(CheckpointError, match=message):
        build(folder)
    assert not loaded


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("awq", "fp8", r"--quantization is fp8, but awq is quantized already \(awq\); leave it out"),
        ("fp8", "awq", r"--quantization is awq, but fp8 is quantized already \(fp8\)"),
        ("packed", "awq", r"packed is quantized already \(compressed-tensors W4A16\)"),
        ("plain", "awq", "--quantization is awq, but plain is not quantized"),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint_is_refused(copy, name, flag, message):
    with pytest.raises(ConfigError, match=message):
        build(copy(name), quantization=flag)


def test_experts_are_not_quantized_while_loading(tmp_path):
    save_tiny(tmp_path, "Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    with pytest.raises(ConfigError, match=r"--quantization is fp8, but .* is a mixture of experts"):
        build(tmp_path, quantization="fp8")


def test_scales_that_are_not_used_are_named_in_the_log(copy, caplog):
    folder = copy("fp8")
    tensors = load_file(folder / "model.safetensors")
    tensors.update({f"{QUERY[:-7]}.k_scale": torch.ones(1), f"{UP}.input_scale": torch.ones(1)})
    save_file(tensors, folder / "model.safetensors")
    caplog.set_level(logging.INFO)
    build(folder)
    assert "2 scales of activations and KV cache are not used, such as model.layers.0" in caplog.text


def test_workers_that_quantize_differently_are_told_apart(copy):
    """Their KV blocks are not the same."""
    plain, rounded = copy("plain"), copy("fp8")

    def manifest(folder: Path, flag: str | None) -> str:
        config = WorkerConfig(model=folder, quantization=flag, dtype="float32", kv_cache_memory_bytes=1 << 20)
        return build_engine(config)[1].manifest_hash

    checkpoint = open_checkpoint(plain)
    assert manifest(plain, None) == manifest_hash(checkpoint.config, checkpoint.entries)
    assert len({manifest(plain, None), manifest(plain, "fp8"), manifest(rounded, None)}) == 3


def test_a_tensor_that_cannot_be_read_ends_the_loading(copy, monkeypatch):
    read = HuggingFaceFolder.read

    def fail(self, name):
        if name == f"{UP}.weight":
            raise CheckpointError(f"{name} cannot be read")
        return read(self, name)

    monkeypatch.setattr(HuggingFaceFolder, "read", fail)
    with pytest.raises(CheckpointError, match=f"{UP}.weight cannot be read"):
        build(copy("plain"))


def test_a_tensor_in_two_files_is_refused(copy):
    folder = copy("plain")
    save_file({"model.norm.weight": torch.zeros(64)}, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"model.norm.weight is in both model.safetensors and more.safetensors"):
        build(folder)

"""Reads Hugging Face model folders: config.json and safetensors, single or sharded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.loader.checkpoint import CheckpointError
from worker.model_config import ModelConfig, RopeScaling, UnsupportedModel

INDEX = "model.safetensors.index.json"


class HuggingFaceFolder:
    """A folder with config.json and *.safetensors.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModel: the configuration asks for something that is not built.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.config = read_config(folder / "config.json")
        self._folder = folder

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for file in _safetensors_files(self._folder):
            with _open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        return shapes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in _safetensors_files(self._folder):
            with _open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield name, tensors.get_tensor(name)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is no readable safetensors file: {error}") from error


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        names = sorted(set(_read_json(index)["weight_map"].values()))
        files = [folder / name for name in names]
        if missing := [file.name for file in files if not file.exists()]:
            raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
        return files
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise CheckpointError(
        f"{folder} has no *.safetensors file; other weight formats are not read, as they can run code"
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; a model folder needs it") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error


def read_config(path: Path) -> ModelConfig:
    """Reads config.json. Raises CheckpointError for a missing key, UnsupportedModel for what is not built."""
    raw = _read_json(path)
    architectures = raw.get("architectures") or ["(none)"]
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"{path} says that the weights are quantized ({method}); that is not supported yet")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{path}: activation {raw['hidden_act']!r} is not supported; supported: silu")
    # transformers 5 keeps both the base and the scaling in rope_parameters, earlier releases apart.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    try:
        heads = raw["num_attention_heads"]
        return ModelConfig(
            architecture=architectures[0],
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_position=raw["max_position_embeddings"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(rope),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            attention_bias=raw.get("attention_bias", False),
            mlp_bias=raw.get("mlp_bias", False),
        )
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from error


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported; supported: linear, llama3")
    return RopeScaling(
        kind=kind,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_position=int(rope.get("original_max_position_embeddings", 8192)),
    )

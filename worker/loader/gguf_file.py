"""Reads GGUF files: metadata and tensors, dequantized one at a time."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from protos.gguf_reader import FastGGUFReader
from worker.loader.checkpoint import CheckpointError, Entry
from worker.model_config import ModelConfig, RopeConfig, UnsupportedModel
from worker.vocabulary import Vocabulary, gguf_vocabulary

ARCHITECTURES = {"llama": "LlamaForCausalLM"}

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """A GGUF file. Tensors of any type that the ``gguf`` package can dequantize become float32.

    Raises:
        CheckpointError: the file is damaged or lacks a key.
        UnsupportedModel: its architecture or RoPE scaling is not built.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._path = path
        try:
            self._reader = FastGGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is no readable GGUF file: {error}") from error
        self.config = self._read_config()

    @cached_property
    def _tensors(self) -> dict[str, gguf.ReaderTensor]:
        return {_hf_name(tensor.name, self._path): tensor for tensor in self._reader.tensors}

    @property
    def entries(self) -> dict[str, Entry]:
        return {
            name: Entry(tuple(int(n) for n in reversed(tensor.shape)), torch.float32)
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self._path}: tensor {tensor.name} has type {tensor.tensor_type.name}, which cannot be read"
            ) from error
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, self.config.num_heads)
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, self.config.num_kv_heads)
        if not values.flags.writeable:
            values = values.copy()  # unquantized tensors are views of the file
        return torch.from_numpy(values)

    def vocabulary(self) -> Vocabulary:
        return gguf_vocabulary(self._reader.fields, self._path)

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise CheckpointError(f"{self._path} lacks the key {key}")
        return default

    def _read_config(self) -> ModelConfig:
        kind = self._field("general.architecture")
        if kind not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{self._path}: GGUF architecture {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if "rope_freqs.weight" in tensors:
            raise UnsupportedModel(f"{self._path}: per-frequency RoPE factors in GGUF files are not supported yet")
        if "token_embd.weight" not in tensors:
            raise CheckpointError(f"{self._path} lacks the tensor token_embd.weight")
        heads = int(self._field(f"{kind}.attention.head_count"))
        hidden = int(self._field(f"{kind}.embedding_length"))
        return ModelConfig(
            architecture=ARCHITECTURES[kind],
            vocab_size=int(tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden,
            intermediate_size=int(self._field(f"{kind}.feed_forward_length")),
            num_layers=int(self._field(f"{kind}.block_count")),
            num_heads=heads,
            num_kv_heads=int(self._field(f"{kind}.attention.head_count_kv", heads)),
            head_dim=int(self._field(f"{kind}.attention.key_length", hidden // heads)),
            max_position=int(self._field(f"{kind}.context_length")),
            rms_norm_eps=float(self._field(f"{kind}.attention.layer_norm_rms_epsilon")),
            rope=self._rope(kind),
            tie_word_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
        )

    def _rope(self, kind: str) -> RopeConfig:
        theta = float(self._field(f"{kind}.rope.freq_base", 10_000.0))
        scaling = self._field(f"{kind}.rope.scaling.type", "none")
        if scaling == "none":
            return RopeConfig(theta)
        if scaling != "linear":
            raise UnsupportedModel(f"{self._path}: RoPE scaling {scaling!r} is not supported; supported: linear")
        return RopeConfig(theta, kind="linear", factor=float(self._field(f"{kind}.rope.scaling.factor")))


def _hf_name(name: str, path: Path) -> str:
    """``blk.3.attn_q.weight`` becomes ``model.layers.3.self_attn.q_proj.weight``."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        raise UnsupportedModel(f"{path}: tensor {name} belongs to no supported layer")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps rotary pairs of llama models side by side; Hugging Face keeps them half a head apart."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)

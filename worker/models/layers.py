"""Layers that the model families share. Weights are created empty and filled by the loader.

A fused projection declares the checkpoint's separate tensors as *parts*: rows of its weight, in order.
"""

import torch
import torch.nn.functional as F
from torch import nn

from kernels.activation import gelu_tanh_mul, silu_mul
from kernels.attention import AttentionBatch, paged_attention
from kernels.kv_cache import write_kv
from kernels.linear import linear
from kernels.norm import add_rms_norm, rms_norm
from kernels.rotary import rotate
from worker.kv_cache import KVCache
from worker.model_config import ModelConfig

Angles = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """Normalises the last dimension, after adding the residual when there is one.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        offset: added to the weight.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to [..., size]."""
        return rms_norm(x, self.weight, self.eps, self.offset)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised sum, sum) of ``x`` and the residual; without a residual, ``x`` begins it."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)


class Linear(nn.Module):
    """``x @ weight.T + bias``, with the outputs of several checkpoint tensors side by side.

    Args:
        in_features: width of the input.
        parts: (checkpoint name, output width) of each fused tensor.
    """

    def __init__(self, in_features: int, parts: list[tuple[str, int]], bias: bool = False) -> None:
        super().__init__()
        out_features = sum(width for _, width in parts)
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in_features] to [tokens, sum of the parts' widths]."""
        return linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Token embeddings; their weight may serve as the output projection too."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] int64 to [tokens, size]."""
        return F.embedding(token_ids, self.weight)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023) over the paged cache.

    Args:
        config: sizes, biases, normalised heads, soft cap.
        layer: index, which chooses the cache's layer and the window.
        fused: the checkpoint itself holds one tensor for query, key and value.
    """

    def __init__(self, config: ModelConfig, layer: int, norm_offset: float = 0.0, fused: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.query_scale or config.head_dim**-0.5
        self.window = config.window(layer)
        self.softcap = config.attention_softcap
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)]
        if fused:
            parts = [("qkv_proj", queries + 2 * keys)]
        self.qkv_proj = Linear(config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(queries, [("o_proj", config.hidden_size)], bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, norm_offset) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, norm_offset) if config.qk_norm else None

    def forward(self, x: torch.Tensor, angles: Angles, cache: KVCache, batch: AttentionBatch) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]; writes the tokens' keys and values into the cache."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        query, key, value = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *angles), rotate(key, *angles)
        key_cache, value_cache = cache.layer(self.layer)
        write_kv(key, value, key_cache, value_cache, batch.slot_mapping)
        attended = paged_attention(query, key_cache, value_cache, batch, self.scale, self.window, self.softcap)
        return self.o_proj(attended.flatten(1))


class GatedMLP(nn.Module):
    """Gated feed-forward layer.

    Args:
        config: hidden size, biases, activation.
        intermediate_size: width inside.
        fused: the checkpoint itself holds one tensor for gate and up.
    """

    def __init__(self, config: ModelConfig, intermediate_size: int, fused: bool = False) -> None:
        super().__init__()
        size, wide = config.hidden_size, intermediate_size
        parts = [("gate_up_proj", 2 * wide)] if fused else [("gate_proj", wide), ("up_proj", wide)]
        self.gate_up_proj = Linear(size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(wide, [("down_proj", size)], bias=config.mlp_bias)
        self.activation = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}[config.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))

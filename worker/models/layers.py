"""Layers that the model families share. Weights are created empty and filled by the loader.

A fused projection declares the checkpoint's separate tensors as *parts*: rows of its weight, in order.
"""

import torch
import torch.nn.functional as F
from torch import nn

from kernels.norm import add_rms_norm, rms_norm
from worker.model_config import ModelConfig, RopeScaling, UnsupportedModel


class RMSNorm(nn.Module):
    """Normalises, after adding the residual when there is one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, size] twice, in and out: (normalised sum, sum). Without a residual, ``x`` begins it."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)


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
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Token embeddings; their weight may serve as the output projection too."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] int64 to [tokens, size]."""
        return F.embedding(token_ids, self.weight)


class RotaryAngles(nn.Module):
    """Cosines and sines of all positions, computed once in float32 and shared by the layers."""

    table: torch.Tensor

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = scale_frequencies(1.0 / config.rope_theta**half, config.rope_scaling)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens] int64 to (cos, sin), each [tokens, head_dim / 2] float32."""
        cos, sin = self.table.index_select(1, positions)
        return cos, sin


def scale_frequencies(frequencies: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    """Applies a context extension to rotary frequencies, [head_dim / 2]. Raises UnsupportedModel for unknown kinds."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        wavelengths = 2 * torch.pi / frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        blend = ((scaling.original_max_position / wavelengths - low) / (high - low)).clamp(0, 1)
        return frequencies * (blend + (1 - blend) / scaling.factor)
    raise UnsupportedModel(f"RoPE scaling {scaling.kind!r} is not supported; supported: linear, llama3")

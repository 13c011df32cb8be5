"""Rotary angles of all positions, and the published ways to stretch them over longer contexts."""

import math

import torch
from torch import nn

from worker.model_config import RopeConfig, UnsupportedModel

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class RotaryAngles(nn.Module):
    """Cosines and sines of every position, computed once in float32 and shared by the layers.

    Args:
        rope: base and stretching.
        head_dim: of which ``rope.partial`` is rotated.
        max_position: positions to prepare, which is also the longest context that will be served.
    """

    table: torch.Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int) -> None:
        super().__init__()
        frequencies, scale = stretched_frequencies(rope, int(head_dim * rope.partial), max_position)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())) * scale, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens] int64 to (cos, sin), each [tokens, rotated dimensions / 2] float32."""
        cos, sin = self.table.index_select(1, positions)
        return cos, sin


def stretched_frequencies(rope: RopeConfig, dim: int, max_position: int) -> tuple[torch.Tensor, float]:
    """Rotary frequencies and the factor of cosines and sines.

    The frequencies are those of a context of ``max_position`` for all positions: kinds whose frequencies depend on the
    length of the sequence (dynamic, longrope) would otherwise make cached keys wrong when a sequence grows.

    Args:
        rope: base and stretching.
        dim: rotated dimensions of a head.
        max_position: the longest context that will be served, in tokens.

    Returns:
        ([dim / 2] float32, factor).

    Raises:
        UnsupportedModel: for unknown kinds.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / rope.factor, 1.0
        case "dynamic":
            length = max(max_position, rope.original_max_position) / rope.original_max_position
            theta = rope.theta * (rope.factor * length - (rope.factor - 1)) ** (dim / (dim - 2))
            return 1.0 / theta**exponents, 1.0
        case "llama3":
            rotations = rope.original_max_position * frequencies / (2 * math.pi)
            low, high = rope.low_freq_factor, rope.high_freq_factor
            kept = ((rotations - low) / (high - low)).clamp(0, 1)
            return frequencies * (kept + (1 - kept) / rope.factor), 1.0
        case "yarn":
            kept = 1 - _yarn_ramp(rope, dim)
            return frequencies * (kept + (1 - kept) / rope.factor), _yarn_attention_factor(rope)
        case "longrope":
            longer = max_position > rope.original_max_position
            divisors = torch.tensor(rope.long_factors if longer else rope.short_factors, dtype=torch.float32)
            return 1.0 / (divisors * rope.theta**exponents), _longrope_attention_factor(rope)
        case _:
            raise UnsupportedModel(f"RoPE scaling {rope.kind!r} is not supported; supported: {', '.join(KINDS)}")


def _yarn_ramp(rope: RopeConfig, dim: int) -> torch.Tensor:
    """How far each dimension is interpolated, 0 to 1 (YaRN: Peng et al., 2023)."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), dim - 1)
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """LongRoPE: Ding et al., 2024."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))

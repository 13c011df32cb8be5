"""Rotary position embedding (Su et al., 2021), in the half-rotated layout of Hugging Face checkpoints."""

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (i, i + head_dim / 2) of each head by its token's angles.

    Args:
        x: [tokens, heads, head_dim].
        cos, sin: [tokens, head_dim / 2], float32: the angles of each token's position.

    Returns:
        [tokens, heads, head_dim], the dtype of ``x``; computed in float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

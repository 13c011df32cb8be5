"""Rotary position embedding (Su et al., 2021), in the half-rotated layout of Hugging Face checkpoints."""

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (i, i + r) of each head's first 2 r dimensions by its token's angles; the others stay.

    Args:
        x: [tokens, heads, head_dim].
        cos, sin: [tokens, r], float32: the angles of each token's position.

    Returns:
        [tokens, heads, head_dim], the dtype of ``x``; computed in float32.
    """
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if 2 * half == x.shape[-1] else torch.cat((rotated, x[..., 2 * half :]), dim=-1)

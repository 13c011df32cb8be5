"""Root-mean-square normalisation (Zhang & Sennrich, 2019), with the residual addition before it in a decoder layer."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: [..., hidden], floating point. The mean is taken in float32.
        weight: [hidden], the dtype of ``x``.
        eps: added to the mean square.

    Returns:
        [..., hidden], the dtype of ``x``.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds ``x`` to the residual stream and normalises the sum.

    Args:
        x, residual: [..., hidden], one dtype.
        weight: [hidden].
        eps: added to the mean square.

    Returns:
        (normalised sum, sum), both [..., hidden].
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual

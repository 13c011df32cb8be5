"""Root-mean-square normalisation (Zhang & Sennrich, 2019), with the residual addition before it in a decoder layer."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Normalises the last dimension: ``x / sqrt(mean(x^2) + eps) * (offset + weight)``.

    Args:
        x: [..., hidden], floating point. The mean is taken in float32.
        weight: [hidden], the dtype of ``x``.
        eps: added to the mean square.
        offset: added to the weight; with one, the product is taken in float32 (Gemma's norm).

    Returns:
        [..., hidden], the dtype of ``x``.
    """
    if x.is_cuda:
        from kernels.gpu.norm import rms_norm as fast

        return fast(x, weight, eps, offset)
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * scale * (offset + weight.float())).to(x.dtype)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds ``x`` to the residual stream and normalises the sum.

    Args:
        x, residual: [..., hidden], one dtype.
        weight: [hidden].
        eps: added to the mean square.
        offset: added to the weight.

    Returns:
        (normalised sum, sum), both [..., hidden].
    """
    if x.is_cuda:
        from kernels.gpu.norm import add_rms_norm as fast

        return fast(x, residual, weight, eps, offset)
    residual = residual + x
    return rms_norm(residual, weight, eps, offset), residual

"""Activations in 8-bit floating point with a scale for each token, alone or together with the operation before.

The operations before round their results to the dtype of ``x`` first, as they do alone, so that it makes no difference
which of the two ways a model takes.
"""

import torch

from kernels.activation import silu_mul
from kernels.float8 import E4M3_MAX, has_float8, saturate
from kernels.norm import add_rms_norm, rms_norm

Quantized = tuple[torch.Tensor, torch.Tensor]
"""(values [tokens, in] float8_e4m3fn, scale [tokens, 1] float32); ``values * scale`` are the numbers meant."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize_per_token(x: torch.Tensor) -> Quantized:
    """Scales each row so that its largest magnitude becomes 448, and rounds it to float8_e4m3fn.

    Args:
        x: [tokens, in], floating point. The rows of a weight, [out, in], are quantized per output in the same way.

    Returns:
        (values, scale), which approximate ``x`` to within 1/16 of an element or 1/1024 of a scale. Rows of zeros stay
        zeros.
    """
    if has_float8(x.device):
        from kernels.gpu.fp8_quantize import quantize_per_token as fast

        return fast(x)
    wide = x.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).clamp(min=_SMALLEST_SCALE)
    return saturate(wide / scale), scale


def rms_norm_quantize(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> Quantized:
    """``quantize_per_token(rms_norm(x, weight, eps, offset))``, of ``x`` [tokens, hidden]."""
    if has_float8(x.device):
        from kernels.gpu.fp8_quantize import rms_norm_quantize as fast

        return fast(x, weight, eps, offset)
    return quantize_per_token(rms_norm(x, weight, eps, offset))


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[Quantized, torch.Tensor]:
    """``add_rms_norm``, of [tokens, hidden], with its first result quantized: (quantized, sum)."""
    if has_float8(x.device):
        from kernels.gpu.fp8_quantize import add_rms_norm_quantize as fast

        return fast(x, residual, weight, eps, offset)
    normed, total = add_rms_norm(x, residual, weight, eps, offset)
    return quantize_per_token(normed), total


def silu_mul_quantize(gate_up: torch.Tensor) -> Quantized:
    """``quantize_per_token(silu_mul(gate_up))``, of [tokens, 2 * intermediate]."""
    if has_float8(gate_up.device):
        from kernels.gpu.fp8_quantize import silu_mul_quantize as fast

        return fast(gate_up)
    return quantize_per_token(silu_mul(gate_up))

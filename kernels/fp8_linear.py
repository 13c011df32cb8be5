"""Matrix products in 8-bit floating point: a scale for each output of the weights, for each token of the activations."""

import torch
import torch.nn.functional as F

from kernels.float8 import E4M3_MAX, saturate, widen

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales each row so that its largest magnitude becomes 448, and rounds it to float8_e4m3fn.

    Args:
        x: [tokens, in], floating point. The rows of a weight, [out, in], are quantized per output in the same way.

    Returns:
        (values, scale): [tokens, in] float8_e4m3fn and [tokens, 1] float32; ``values * scale`` approximates ``x``, to
        within 1/16 of an element or 1/1024 of a scale. Rows of zeros stay zeros.
    """
    wide = x.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).clamp(min=_SMALLEST_SCALE)
    return saturate(wide / scale), scale


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ (weight * weight_scale).T + bias``, with ``x`` quantized token by token and the sums taken in float32.

    Args:
        x: [tokens, in].
        weight: [out, in] float8_e4m3fn.
        weight_scale: [out] or [1], float32.
        bias: [out], or None.

    Returns:
        [tokens, out], the dtype of ``x``, rounded once.
    """
    values, scale = quantize_per_token(x)
    y = F.linear(values.float(), widen(weight, torch.float32)) * scale * weight_scale
    return (y if bias is None else y + bias.float()).to(x.dtype)

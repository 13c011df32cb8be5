"""Matrix products in 8-bit floating point (Micikevicius et al., 2022): a scale for each output of the weights, and for
each token of the activations.
"""

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


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
    # A quotient may be rounded to just above the largest value, which some releases of torch turn into NaN.
    return (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


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
    y = F.linear(values.float(), _to_float32(weight)) * scale * weight_scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _to_float32(weight: torch.Tensor) -> torch.Tensor:
    """The values of a contiguous weight. On a CPU they are looked up: torch computes each, five times as slowly."""
    if weight.is_cuda:
        return weight.float()
    return _VALUES.index_select(0, weight.view(torch.uint8).flatten().int()).view(weight.shape)

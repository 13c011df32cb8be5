"""Matrix products in 8-bit floating point: weights have a scale for each output, activations one for each token."""

import torch
import torch.nn.functional as F

from kernels.activation import GATED
from kernels.float8 import has_float8, widen
from kernels.fp8_quantize import Quantized, silu_mul_quantize


def fp8_product(
    values: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(values * scale) @ (weight * weight_scale).T + bias``, with the sums taken in float32.

    Args:
        values, scale: [tokens, in] float8_e4m3fn and [tokens, 1] float32, see ``kernels.fp8_quantize``.
        weight: [out, in] float8_e4m3fn.
        weight_scale: [out] or [1], float32.
        dtype: of the result.
        bias: [out], or None.

    Returns:
        [tokens, out] in ``dtype``, rounded once; on a GPU, float16 is rounded to bfloat16 on its way.
    """
    if has_float8(values.device) and dtype != torch.float32:
        from kernels.gpu.fp8_linear import fits, scaled_mm
        from kernels.gpu.linear import MAX_ROWS, skinny_linear

        if len(values) <= MAX_ROWS:
            out_scale = weight_scale.expand(weight.shape[0])
            return skinny_linear(values, weight, bias, scales=(scale.flatten(), out_scale.contiguous()), dtype=dtype)
        if fits(weight):
            return scaled_mm(values, scale, weight, weight_scale, dtype, bias)
    y = F.linear(widen(values, torch.float32), widen(weight, torch.float32)) * scale * weight_scale
    return (y if bias is None else y + bias.float()).to(dtype)


def fp8_gated_product(
    values: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    activation: str,
    quantize: bool = False,
) -> torch.Tensor | Quantized:
    """``act(gate) * up`` of ``gate, up = fp8_product(...)``, the halves of its outputs: [tokens, out / 2].

    ``activation`` is a name in ``kernels.activation.GATED``; the rest as in ``fp8_product``. With ``quantize`` the
    result is ``Quantized`` where that is best done in one with the gate.
    """
    if has_float8(values.device) and dtype != torch.float32:
        from kernels.gpu.linear import MAX_ROWS, skinny_linear

        if len(values) <= MAX_ROWS:
            scales = scale.flatten(), weight_scale.expand(weight.shape[0]).contiguous()
            return skinny_linear(values, weight, bias, activation, scales, dtype)
    outputs = fp8_product(values, scale, weight, weight_scale, dtype, bias)
    return silu_mul_quantize(outputs) if quantize and activation == "silu" else GATED[activation](outputs)

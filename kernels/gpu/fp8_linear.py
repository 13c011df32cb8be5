"""Products in 8-bit floating point by torch's row-wise scaled GEMM, which computes in the matrix units' FP8.

Not bit for bit the reference: its sums are of fewer bits than float32, and in another order.
"""

import torch


def fits(weight: torch.Tensor) -> bool:
    """Whether the GEMM takes a weight of this shape, [out, in]: multiples of 16."""
    return weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0


def scaled_mm(
    values: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """See ``kernels.fp8_linear.fp8_product``; ``dtype`` is bfloat16 or float16."""
    out_scale = weight_scale.view(1, -1).expand(1, weight.shape[0]).contiguous()
    # bfloat16 is the one result that the GEMM has everywhere. Fast accumulation sums in fewer bits than float32: what
    # that costs (0.2 % of the result's size) is a tenth of what 8-bit operands cost, and it is up to a tenth faster.
    y = torch._scaled_mm(
        values,
        weight.t(),
        scale_a=scale,
        scale_b=out_scale,
        bias=None if bias is None else bias.bfloat16(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y.to(dtype)

"""Root-mean-square normalisation, one program a row."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import dependent_launch, wait_for_previous


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, size, eps, offset,
    ADD: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = row * size + column
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait_for_previous(DEPENDENT)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if ADD:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0)
        tl.store(sum_ptr + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / size + eps)
    if OFFSET:  # noqa: SIM108 (a constexpr branch)
        out = wide * scale * (offset + weight.to(tl.float32))
    else:
        out = (wide * scale).to(x.dtype) * weight
    tl.store(out_ptr + at, out.to(x.dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """See ``kernels.norm.rms_norm``."""
    return _launch(x, None, weight, eps, offset)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.norm.add_rms_norm``."""
    return _launch(x, residual.contiguous(), weight, eps, offset)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    rows = x.numel() // size
    if rows:
        block = triton.next_power_of_2(size)
        dependent = dependent_launch(x.device)
        _rms_norm_kernel[(rows,)](
            x, x if residual is None else residual, weight, out, total, size, eps, offset,
            ADD=residual is not None, OFFSET=offset != 0, BLOCK=block, DEPENDENT=dependent,
            num_warps=min(max(block // 1024, 1), 16), launch_pdl=dependent,
        )  # fmt: skip
    return out, total

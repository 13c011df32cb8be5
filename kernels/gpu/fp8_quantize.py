"""Rows quantized to 8-bit floating point, and computed in the same pass where a norm or an activation comes before.

One program a row: it needs the row's largest magnitude before it can round the first element.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import dependent_launch, wait_for_previous


@triton.jit
def _store_quantized(x, values_ptr, scale_ptr, row, column, inside, size):
    """Writes a row, [BLOCK] with zeros outside, as float8 values and their scale."""
    wide = x.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide)) / 448.0, 1.1754943508222875e-38)
    scaled = tl.clamp(wide * (1.0 / scale), -448.0, 448.0)
    tl.store(values_ptr + row * size + column, scaled.to(values_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _quantize_kernel(x_ptr, values_ptr, scale_ptr, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    wait_for_previous(DEPENDENT)
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0)
    _store_quantized(x, values_ptr, scale_ptr, row, column, inside, size)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, values_ptr, scale_ptr, size, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    wait_for_previous(DEPENDENT)
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    x = (wide * tl.sigmoid(wide)).to(gate.dtype) * up
    _store_quantized(x, values_ptr, scale_ptr, row, column, inside, size)


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, values_ptr, scale_ptr, sum_ptr, size, eps, offset,
    ADD: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait_for_previous(DEPENDENT)
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0)
    if ADD:
        x += tl.load(residual_ptr + row * size + column, mask=inside, other=0.0)
        tl.store(sum_ptr + row * size + column, x, mask=inside)
    wide = x.to(tl.float32)
    norm = tl.rsqrt(tl.sum(wide * wide) / size + eps)
    if OFFSET:  # noqa: SIM108 (a constexpr branch)
        out = (wide * norm * (offset + weight.to(tl.float32))).to(x.dtype)
    else:
        out = (wide * norm).to(x.dtype) * weight
    _store_quantized(out, values_ptr, scale_ptr, row, column, inside, size)


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.fp8_quantize.quantize_per_token``."""
    return _launch(_quantize_kernel, x.contiguous(), x.shape[1])


def silu_mul_quantize(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.fp8_quantize.silu_mul_quantize``."""
    return _launch(_silu_mul_kernel, gate_up.contiguous(), gate_up.shape[1] // 2)


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.fp8_quantize.rms_norm_quantize``."""
    return _launch_norm(x, None, weight, eps, offset)[0]


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """See ``kernels.fp8_quantize.add_rms_norm_quantize``."""
    return _launch_norm(x, residual.contiguous(), weight, eps, offset)


def _launch(kernel: triton.JITFunction, x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a kernel with a row of ``x`` in, and a row of ``size`` values and a scale out."""
    values, scale = _results(x, size)
    if len(x):
        block, dependent = triton.next_power_of_2(size), dependent_launch(x.device)
        kernel[(len(x),)](
            x, values, scale, size, BLOCK=block, DEPENDENT=dependent, num_warps=_warps(block), launch_pdl=dependent
        )
    return values, scale


def _launch_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    x = x.contiguous()
    values, scale = _results(x, x.shape[1])
    total = x if residual is None else torch.empty_like(x)
    if len(x):
        block, dependent = triton.next_power_of_2(x.shape[1]), dependent_launch(x.device)
        _rms_norm_kernel[(len(x),)](
            x, x if residual is None else residual, weight, values, scale, total, x.shape[1], eps, offset,
            ADD=residual is not None, OFFSET=offset != 0, BLOCK=block, DEPENDENT=dependent,
            num_warps=_warps(block), launch_pdl=dependent,
        )  # fmt: skip
    return (values, scale), total


def _results(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty((len(x), size), dtype=torch.float8_e4m3fn, device=x.device)
    return values, torch.empty((len(x), 1), dtype=torch.float32, device=x.device)


def _warps(block: int) -> int:
    return min(max(block // 1024, 1), 16)

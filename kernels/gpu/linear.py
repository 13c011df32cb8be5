"""Products of few rows with a large weight: as fast as the weight can be read.

A program owns some of the weight's rows and, when there are not enough of them to fill the GPU, a part of their length;
the program that ends last then sums the parts, in a fixed order. The weight is the left operand, so that its rows fill
the matrix units however few the rows of ``x`` are. While the kernel before still runs, each program fetches the
beginning of its weights into the L2 cache.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import dependent_launch, num_multiprocessors, wait_for_previous

MAX_ROWS = 64


@triton.jit
def _prefetch(ptr):
    """Asks for the cache line at each pointer; reads nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr, rows, out_features, in_features,
    BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, PREFETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_ROWS)
    inner = tl.arange(0, BLOCK_IN)
    there = column < out_features
    steps = tl.cdiv(in_features, BLOCK_IN)
    per_part = tl.cdiv(steps, SPLIT)
    first = part * per_part
    last = tl.minimum(first + per_part, steps)
    weight_row = weight_ptr + tl.where(there, column, 0).to(tl.int64)[:, None] * in_features
    if PREFETCH > 0:
        if DEPENDENT:
            tl.extra.cuda.gdc_launch_dependents()
            line = tl.arange(0, BLOCK_IN // 64) * 64
            for step in range(first, tl.minimum(first + PREFETCH, last)):
                _prefetch(weight_row + step * BLOCK_IN + line[None, :])
            tl.extra.cuda.gdc_wait()
    else:
        wait_for_previous(DEPENDENT)
    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        at = step * BLOCK_IN + inner
        if EVEN:
            weight = tl.load(weight_row + at[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + row[None, :] * in_features + at[:, None], mask=(row < rows)[None, :], other=0.0)
        else:
            inside = at < in_features
            weight = tl.load(weight_row + at[None, :], mask=inside[None, :], other=0.0)
            read = (row < rows)[None, :] & inside[:, None]
            x = tl.load(x_ptr + row[None, :] * in_features + at[:, None], mask=read, other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    out_at = row[None, :] * out_features + column[:, None]
    written = there[:, None] & (row < rows)[None, :]
    if SPLIT > 1:
        plane = rows * out_features
        tl.store(partial_ptr + part * plane + out_at, acc, mask=written)
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel")
        if before == SPLIT - 1:
            tl.store(arrived_ptr + tl.program_id(0), 0)
            acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
            for other in range(SPLIT):
                acc += tl.load(partial_ptr + other * plane + out_at, mask=written, other=0.0, cache_modifier=".cg")
            if BIAS:
                acc += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[:, None]
            tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=written)
    else:
        if BIAS:
            acc += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=written)


@dataclass(frozen=True)
class Shape:
    """How a product is cut up.

    Attributes:
        block_out: of the weight's rows, those of a program.
        block_in: of their length, what is read at once.
        split: parts of their length.
        stages, warps: of a program.
        prefetch: reads of ``block_in`` that are begun before the kernel before has ended.
    """

    block_out: int
    block_in: int
    split: int
    stages: int
    warps: int
    prefetch: int


@cache
def choose_shape(rows: int, out_features: int, in_features: int, device: torch.device) -> Shape:
    """The cut for a size: rules that agree with what measured best on an H200 (``benchmarks/kernels.py --tune``)."""
    if out_features >= 16384:
        return Shape(block_out=128, block_in=128, split=1, stages=4, warps=8, prefetch=2)
    programs, processors = triton.cdiv(out_features, 64), num_multiprocessors(device)

    def balance(split: int) -> float:
        """The share of the processors that is busy, less what it costs to sum the parts."""
        waves = programs * split / processors
        return float(waves / math.ceil(waves) - 0.03 * math.log2(split) * (1 + rows / 16))

    split = max((split for split in (1, 2, 4, 8) if split == 1 or in_features >= 512 * split), key=balance)
    waves = math.ceil(programs * split / processors)
    return Shape(block_out=64, block_in=128, split=split, stages=max(7 - 2 * waves, 3), warps=4, prefetch=2)


_arrivals: dict[torch.device, torch.Tensor] = {}


def _arrived(device: torch.device) -> torch.Tensor:
    """Counters of ended parts: zero between kernels, which run one after another on the device's one stream."""
    if device not in _arrivals:
        _arrivals[device] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    return _arrivals[device]


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, shape: Shape | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` for at most ``MAX_ROWS`` rows; see ``kernels.linear.linear``."""
    x = x.contiguous()
    rows, in_features = x.shape
    out_features = weight.shape[0]
    out = x.new_empty((rows, out_features))
    cut = shape or choose_shape(rows, out_features, in_features, x.device)
    programs = triton.cdiv(out_features, cut.block_out)
    partial, arrived = out, out
    if cut.split > 1:
        partial = torch.empty((cut.split, rows, out_features), dtype=torch.float32, device=x.device)
        arrived = _arrived(x.device)
    dependent = dependent_launch(x.device)
    _skinny_kernel[(programs, cut.split)](
        x, weight, weight if bias is None else bias, out, partial, arrived, rows, out_features, in_features,
        BIAS=bias is not None, BLOCK_ROWS=max(triton.next_power_of_2(rows), 16), BLOCK_OUT=cut.block_out,
        BLOCK_IN=cut.block_in, SPLIT=cut.split, STAGES=cut.stages, EVEN=in_features % cut.block_in == 0,
        PREFETCH=cut.prefetch, DEPENDENT=dependent, num_warps=cut.warps, launch_pdl=dependent,
    )  # fmt: skip
    return out

"""Products of few rows with a large weight: as fast as the weight can be read.

A program owns a tile of the weight's rows and, when there are not enough of them to fill the GPU, a part of their
length; the program that ends last then sums the parts, in a fixed order. The weight is the left operand, so that its
rows fill the matrix units however few the rows of ``x`` are. While the kernel before still runs, each program fetches
the beginning of its weights into the L2 cache; for that it must find room beside it, so that programs take no more
shared memory than they need.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import dependent_launch, num_multiprocessors, prefetch, wait_for_previous

MAX_ROWS = 64
_GATES = {None: 0, "silu": 1, "gelu_tanh": 2}  # by activation


@triton.jit
def _finish(
    acc, row, column, rows, width, x_scale_ptr, weight_scale_ptr, bias_ptr, SCALED: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Scales and bias of a tile of sums, [outputs, rows]."""
    if SCALED:
        acc *= tl.load(weight_scale_ptr + column, mask=column < width, other=0.0)[:, None]
        acc *= tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def _store(
    acc, up, tile, row, rows, width, x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """Writes the results of a tile, whose sums are complete; ``up`` is of gated products only."""
    column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    result = _finish(acc, row, column, rows, width, x_scale_ptr, weight_scale_ptr, bias_ptr, SCALED, BIAS)
    if GATE:
        gate = result
        up = _finish(
            up, row, column, rows, width, x_scale_ptr, weight_scale_ptr + width, bias_ptr + width, SCALED, BIAS
        )
        if GATE == 1:
            result = gate * tl.sigmoid(gate) * up
        else:
            # tanh(z) = 2 sigmoid(2 z) - 1
            bent = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            result = gate * tl.sigmoid(2 * bent) * up
    written = (column < width)[:, None] & (row < rows)[None, :]
    at = out_ptr + row[None, :] * width + column[:, None]
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    x_ptr, weight_ptr, bias_ptr, x_scale_ptr, weight_scale_ptr, out_ptr, partial_ptr, arrived_ptr,
    rows, width, in_features, SCALED: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    PREFETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    # A part is the sums of a tile; with a gate, twice as many.
    PART: tl.constexpr = BLOCK_OUT * BLOCK_ROWS * (2 if GATE else 1)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_ROWS)
    inner = tl.arange(0, BLOCK_IN)
    column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    steps = tl.cdiv(in_features, BLOCK_IN)
    per_part = tl.cdiv(steps, SPLIT)
    first = part * per_part
    last = tl.minimum(first + per_part, steps)
    weight_row = weight_ptr + tl.where(column < width, column, 0).to(tl.int64)[:, None] * in_features
    up_row = weight_row + width.to(tl.int64) * in_features
    if DEPENDENT and PREFETCH > 0:
        tl.extra.cuda.gdc_launch_dependents()
        start = tl.minimum(first * BLOCK_IN, in_features)
        count = tl.minimum(tl.minimum(first + PREFETCH, last) * BLOCK_IN, in_features) - start
        size = count * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8) // 16 * 16
        if size > 0:
            sizes = size + tl.zeros([BLOCK_OUT, 1], tl.int32)
            prefetch(weight_row + start, sizes)
            if GATE:
                prefetch(up_row + start, sizes)
        tl.extra.cuda.gdc_wait()
    else:
        wait_for_previous(DEPENDENT)
    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    up = acc
    for step in tl.range(first, last, num_stages=STAGES):
        at = step * BLOCK_IN + inner
        read = (row < rows)[None, :]
        if not EVEN:
            read = read & (at < in_features)[:, None]
        x = tl.load(x_ptr + row[None, :] * in_features + at[:, None], mask=read, other=0.0)
        if EVEN:
            weight = tl.load(weight_row + at[None, :], eviction_policy="evict_first")
        else:
            weight = tl.load(weight_row + at[None, :], mask=(at < in_features)[None, :], other=0.0)
        # The matrix units' sums of 8-bit products have few digits: in float32 from block to block, which costs nothing.
        acc = tl.dot(weight, x, acc, input_precision="ieee", max_num_imprecise_acc=BLOCK_IN)
        if GATE:
            if EVEN:
                weight = tl.load(up_row + at[None, :], eviction_policy="evict_first")
            else:
                weight = tl.load(up_row + at[None, :], mask=(at < in_features)[None, :], other=0.0)
            up = tl.dot(weight, x, up, input_precision="ieee", max_num_imprecise_acc=BLOCK_IN)
    complete = True
    if SPLIT > 1:
        mine = partial_ptr + (tile * SPLIT + part) * PART + tl.arange(0, BLOCK_OUT)[:, None] * BLOCK_ROWS + row[None, :]
        tl.store(mine, acc)
        if GATE:
            tl.store(mine + PART // 2, up)
        tl.debug_barrier()
        complete = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLIT - 1
        if complete:
            tl.store(arrived_ptr + tile, 0)
            acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
            up = acc
            for other in tl.static_range(SPLIT):
                theirs = mine + (other - part) * PART
                acc += tl.load(theirs, cache_modifier=".cg")
                if GATE:
                    up += tl.load(theirs + PART // 2, cache_modifier=".cg")
    if complete:
        _store(
            acc, up, tile, row, rows, width, x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr,
            SCALED, BIAS, GATE, BLOCK_OUT,
        )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """How a product is cut up.

    Attributes:
        block_out: of the weight's rows, those of a tile.
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
def choose_shape(
    rows: int, width: int, in_features: int, gated: bool, device: torch.device, itemsize: int = 2
) -> Shape:
    """The cut for a size: rules that agree with what measured best on an H200 (``benchmarks/kernels.py --tune``).

    ``itemsize``: bytes of a weight. What a program has on its way from memory must be as much whatever it is.
    """
    block_in = 256 // itemsize
    if gated and itemsize == 1:
        return Shape(block_out=128, block_in=128, split=1, stages=4, warps=8, prefetch=2)
    if gated:
        return Shape(block_out=64, block_in=block_in, split=1, stages=4, warps=4, prefetch=4)
    if width >= 16384:
        return Shape(block_out=128, block_in=block_in, split=1, stages=4, warps=8, prefetch=2)
    programs, processors = triton.cdiv(width, 64), num_multiprocessors(device)

    def balance(split: int) -> float:
        """The share of the processors that is busy, less what it costs to sum the parts."""
        waves = programs * split / processors
        return float(waves / math.ceil(waves) - 0.03 * math.log2(split) * (1 + rows / 16))

    splits = (split for split in (1, 2, 4, 8) if split == 1 or in_features >= 4 * block_in * split)
    split = max(splits, key=balance)
    if itemsize == 1 and programs > processors:
        return Shape(block_out=128, block_in=128, split=1, stages=6, warps=8, prefetch=2)
    if itemsize == 1 and programs > 0.7 * processors:
        split = 1
    stages = 6 if programs * split <= processors else 3
    return Shape(block_out=64, block_in=block_in, split=split, stages=stages, warps=4, prefetch=2)


_scratch: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}


def _parts(device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for ``size`` partial sums, and counters of ended parts, zero between kernels: which share both, as they run
    one after another on the device's one stream. What became too small is kept: captured graphs write to it."""
    made = _scratch.setdefault(device, [])
    if not made or made[-1][0].numel() < size:
        counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)
        made.append((torch.empty(size, dtype=torch.float32, device=device), counters))
    return made[-1]


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias`` for at most ``MAX_ROWS`` rows; see ``kernels.linear``.

    Args:
        activation: "silu" or "gelu_tanh" of a gate: outputs are halves, gate and up; the result is ``act(gate) * up``.
        scales: of 8-bit operands: [tokens] and [out] float32.
        dtype: of the result; None is that of ``x``.
        shape: the cut; None chooses one.
    """
    x = x.contiguous()
    rows, in_features = x.shape
    out_features = weight.shape[0]
    width = out_features // 2 if activation else out_features
    out = x.new_empty((rows, width), dtype=dtype or x.dtype)
    cut = shape or choose_shape(rows, width, in_features, activation is not None, x.device, weight.element_size())
    block_rows = max(triton.next_power_of_2(rows), 16)
    tiles = triton.cdiv(width, cut.block_out)
    partial, arrived = out, out
    if cut.split > 1:
        size = tiles * cut.split * cut.block_out * block_rows * (2 if activation else 1)
        partial, arrived = _parts(x.device, size)
    x_scale, weight_scale = scales or (x, x)
    dependent = dependent_launch(x.device)
    aligned = weight.data_ptr() % 16 == 0 and in_features * weight.element_size() % 16 == 0
    _skinny_kernel[(tiles, cut.split)](
        x, weight, weight if bias is None else bias, x_scale, weight_scale, out, partial, arrived,
        rows, width, in_features, SCALED=scales is not None, BIAS=bias is not None, GATE=_GATES[activation],
        BLOCK_ROWS=block_rows, BLOCK_OUT=cut.block_out, BLOCK_IN=cut.block_in, SPLIT=cut.split, STAGES=cut.stages,
        EVEN=in_features % cut.block_in == 0, PREFETCH=cut.prefetch if aligned else 0,
        DEPENDENT=dependent, num_warps=cut.warps, launch_pdl=dependent,
    )  # fmt: skip
    return out

"""Mixtures of experts as grouped products, in launches that depend on shapes only, never on which experts are chosen.

(token, expert) pairs are sorted by expert. Each expert's pairs are cut into tiles of rows; a program finds out by
itself whose tile it has, and ends at once where there are fewer tiles than there might have been. The weight is the
left operand, so that its rows fill the matrix units however few pairs an expert has.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.activation import silu_mul
from kernels.gpu.launch import dependent_launch, wait_for_previous


@triton.jit
def _grouped_kernel(
    x_ptr, weight_ptr, out_ptr, order_ptr, starts_ptr, factor_ptr, out_features, in_features,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, FACTORS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, BLOCK_IN)
    there = column < out_features
    wait_for_previous(DEPENDENT)
    every = tl.arange(0, EXPERTS_PAD)
    start = tl.load(starts_ptr + every, mask=every < EXPERTS, other=0)
    end = tl.load(starts_ptr + every + 1, mask=every < EXPERTS, other=0)
    tiles = tl.cdiv(end - start, BLOCK_ROWS)
    after = tl.cumsum(tiles, axis=0)
    expert = tl.sum((after <= tile).to(tl.int32))
    if expert < EXPERTS:
        own = every == expert
        tile_in_expert = tile - tl.sum(tl.where(own, after - tiles, 0))
        place = tl.sum(tl.where(own, start, 0)) + tile_in_expert * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        real = place < tl.sum(tl.where(own, end, 0))
        pair = tl.load(order_ptr + place, mask=real, other=0)
        source = x_ptr + (pair // PAIRS_PER_ROW) * in_features
        weight_row = (
            weight_ptr + (expert.to(tl.int64) * out_features + tl.where(there, column, 0))[:, None] * in_features
        )
        acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        for step in tl.range(0, tl.cdiv(in_features, BLOCK_IN), num_stages=STAGES):
            at = step * BLOCK_IN + inner
            if EVEN:
                weight = tl.load(weight_row + at[None, :])
                x = tl.load(source[None, :] + at[:, None], mask=real[None, :], other=0.0)
            else:
                inside = at < in_features
                weight = tl.load(weight_row + at[None, :], mask=inside[None, :], other=0.0)
                x = tl.load(source[None, :] + at[:, None], mask=real[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(weight, x, acc, input_precision="ieee")
        if FACTORS:
            acc *= tl.load(factor_ptr + pair, mask=real, other=0.0).to(tl.float32)[None, :]
        to = out_ptr + pair[None, :] * out_features + column[:, None]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=there[:, None] & real[None, :])


@dataclass(frozen=True)
class Shape:
    """How a grouped product is cut up: pairs and outputs of a program, inputs read at once, stages and warps."""

    block_rows: int
    block_out: int
    block_in: int
    stages: int
    warps: int


def choose_shape(pairs: int, experts: int, dtype: torch.dtype) -> Shape:
    """The cut for that many pairs: tiles of about as many rows as an expert gets, so that most read a weight once."""
    rows = min(max(triton.next_power_of_2(pairs // experts), 16), 128)
    if dtype == torch.float32:
        return Shape(min(rows, 32), block_out=64, block_in=32, stages=2, warps=4)
    if rows <= 32:
        return Shape(rows, block_out=64, block_in=128, stages=4, warps=4)
    return Shape(rows, block_out=128, block_in=64, stages=4, warps=8)


def experts_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    shape: Shape | None = None,
) -> torch.Tensor:
    """See ``kernels.experts.experts_mlp``. Sums of a token's experts are rounded once."""
    tokens, chosen = experts.shape
    count = len(gate_up)
    by_expert, order = experts.flatten().sort(stable=True)
    starts = torch.searchsorted(by_expert, torch.arange(count + 1, device=x.device), out_int32=True)
    cut = shape or choose_shape(order.numel(), count, x.dtype)
    hidden = _grouped(x.contiguous(), gate_up, order, starts, None, chosen, cut)
    parts = _grouped(silu_mul(hidden), down, order, starts, weights.contiguous(), 1, cut)
    return parts.view(tokens, chosen, -1).sum(dim=1)


def _grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    factors: torch.Tensor | None,
    pairs_per_row: int,
    cut: Shape,
) -> torch.Tensor:
    """Each pair's row of ``x`` through its expert's weight.

    Args:
        x: [rows, in]; pair p has row p // pairs_per_row.
        weight: [experts, out, in].
        order: [pairs] int64: the pairs, sorted by expert.
        starts: [experts + 1] int32: where each expert's pairs begin in ``order``.
        factors: [pairs]: what results are multiplied with, or None.

    Returns:
        [pairs, out], by pair.
    """
    count, out_features, in_features = weight.shape
    pairs = order.numel()
    out = x.new_empty((pairs, out_features))
    most_tiles = min(count, pairs) + pairs // cut.block_rows
    dependent = dependent_launch(x.device)
    _grouped_kernel[(most_tiles, triton.cdiv(out_features, cut.block_out))](
        x, weight, out, order, starts, x if factors is None else factors, out_features, in_features,
        EXPERTS=count, EXPERTS_PAD=triton.next_power_of_2(count), PAIRS_PER_ROW=pairs_per_row,
        FACTORS=factors is not None, BLOCK_ROWS=cut.block_rows, BLOCK_OUT=cut.block_out, BLOCK_IN=cut.block_in,
        STAGES=cut.stages, EVEN=in_features % cut.block_in == 0, DEPENDENT=dependent, num_warps=cut.warps,
        launch_pdl=dependent,
    )  # fmt: skip
    return out

"""Products with 4-bit weights: of few rows as fast as the codes can be read, of many on dequantized weights.

A word's eight codes belong to eight runs of sixteen inputs, so that a tile of words, [outputs, 16], is unpacked by
shift and mask into eight left operands of a matrix instruction, in the registers where the words are. A code stands for
(code - zero) * scale: the difference is exact in half precision, and the scale multiplies sums, not weights.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.awq_linear import TILE_INPUTS
from kernels.gpu.launch import dependent_launch, num_multiprocessors, wait_for_previous
from kernels.gpu.split_sum import arrival_counters, store_sum

MAX_ROWS = 192
"""Up to here, reading the codes up to three times moves fewer bytes than writing the weight in full and reading it."""

_BLOCK_ROWS = 64

# Of two words the codes at one place, as a pair of numbers: a code in the last bits of 128 (bfloat16) or 1024 (float16)
# is added to it. $3 is what to subtract, $4 picks the words' halves, $6 is the shift in them.
_UNPACK_BFLOAT16: tl.constexpr = tl.constexpr("""{
    .reg .b32 pair;
    prmt.b32 pair, $1, $2, $4;
    shr.u32 pair, pair, $6;
    lop3.b32 pair, pair, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $0, pair, $3;
}""")
_UNPACK_FLOAT16: tl.constexpr = tl.constexpr("""{
    .reg .b32 pair;
    prmt.b32 pair, $1, $2, $4;
    shr.u32 pair, pair, $6;
    lop3.b32 pair, pair, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 $0, pair, $3;
}""")


@triton.jit
def _subtracted(zero, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """What ``_unpack`` subtracts, [outputs, 1], for zero points [outputs]."""
    wide = zero.to(tl.float32)[:, None]
    if PAIRS:
        wide = (wide + (128 if tl.bfloat16 == DTYPE else 1024)).to(DTYPE)
    return wide


@triton.jit
def _unpack(words, subtracted, place: tl.constexpr, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """Codes at this place of words [outputs, 16], less their zero points, as [outputs, 16] of ``DTYPE``."""
    if PAIRS:
        offset = tl.broadcast_to(subtracted, words.shape)
        half = tl.full(words.shape, 0x5410 if place < 4 else 0x7632, tl.int32)
        shift = tl.full(words.shape, 4 * (place % 4), tl.int32)
        asm: tl.constexpr = _UNPACK_BFLOAT16 if tl.bfloat16 == DTYPE else _UNPACK_FLOAT16
        code = tl.inline_asm_elementwise(
            asm, "=r,r,r,r,r,r,r,r", [words, offset, half, shift], dtype=offset.dtype, is_pure=True, pack=2
        )
    else:
        code = (((words >> 4 * place) & 15).to(tl.float32) - subtracted).to(DTYPE)
    return code


@triton.jit
def _load_group(scale_ptr, zero_ptr, group, out_features, column, ZEROS: tl.constexpr):
    """(scales, zeros) of a group, each [outputs], float32 and as they are stored."""
    scale = tl.load(scale_ptr + group * out_features + column).to(tl.float32)
    if ZEROS:
        return scale, tl.load(zero_ptr + group * out_features + column)
    return scale, tl.full(column.shape, 8, tl.uint8)  # SYMMETRIC_ZERO


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    rows, out_features, in_features, groups,
    GROUP_SIZE: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = 128
    WORDS: tl.constexpr = 16
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    ONE_GROUP: tl.constexpr = GROUP_SIZE % TILE == 0  # has all inputs of a tile
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, BLOCK_ROWS)
    word = tl.arange(0, WORDS)
    there = column < out_features
    source = tl.where(there, column, 0)
    tiles = tl.cdiv(in_features, TILE)
    per_part = tl.cdiv(tiles, SPLIT)
    first = tl.program_id(1) * per_part
    last = tl.minimum(first + per_part, tiles)
    weight_row = weight_ptr + source.to(tl.int64)[:, None] * tiles * WORDS + word[None, :]
    # A group's scales are asked for one tile ahead.
    group = tl.minimum(first * TILE // GROUP_SIZE, groups - 1)
    scale, zero = _load_group(scale_ptr, zero_ptr, group, out_features, source, ZEROS)
    wait_for_previous(DEPENDENT)
    acc = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        words = tl.load(weight_row + tile * WORDS)
        if ONE_GROUP:
            group = tl.minimum((tile + 1) * TILE // GROUP_SIZE, groups - 1)
            next_scale, next_zero = _load_group(scale_ptr, zero_ptr, group, out_features, source, ZEROS)
            subtracted = _subtracted(zero, DTYPE, PAIRS)
            tile_sum = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        for place in tl.static_range(8):
            at = tile * TILE + 16 * place + word
            read = (row < rows)[None, :]
            if not EVEN:
                read &= (at < in_features)[:, None]
            x = tl.load(x_ptr + row[None, :] * in_features + at[:, None], mask=read, other=0.0)
            if ONE_GROUP:
                weight = _unpack(words, subtracted, place, DTYPE, PAIRS)
                tile_sum = tl.dot(weight, x, tile_sum, input_precision="ieee")
            else:
                group = tl.minimum((tile * TILE + 16 * place) // GROUP_SIZE, groups - 1)
                scale, zero = _load_group(scale_ptr, zero_ptr, group, out_features, source, ZEROS)
                weight = _unpack(words, _subtracted(zero, DTYPE, PAIRS), place, DTYPE, PAIRS)
                acc += tl.dot(weight, x, input_precision="ieee") * scale[:, None]
        if ONE_GROUP:
            acc += tile_sum * scale[:, None]
            scale, zero = next_scale, next_zero
    at = row[None, :] * out_features + column[:, None]
    written = there[:, None] & (row < rows)[None, :]
    plane = rows * out_features
    store_sum(acc, out_ptr, bias_ptr, partial_ptr, arrived_ptr, at, written, column, there, plane, BIAS, SPLIT)


@triton.jit
def _dequantize_kernel(
    weight_ptr, scale_ptr, zero_ptr, out_ptr, out_features, in_features,
    GROUP_SIZE: tl.constexpr, ZEROS: tl.constexpr, BLOCK_OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = 128
    WORDS: tl.constexpr = 16
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    tile = tl.program_id(1)
    word = tl.arange(0, WORDS)
    there = column < out_features
    source = tl.where(there, column, 0)
    row = source.to(tl.int64)[:, None]
    words = tl.load(weight_ptr + (row * tl.num_programs(1) + tile) * WORDS + word[None, :])
    wait_for_previous(DEPENDENT)
    for place in tl.static_range(8):
        at = tile * TILE + 16 * place + word
        if tile * TILE + 16 * place < in_features:
            group = (tile * TILE + 16 * place) // GROUP_SIZE
            scale, zero = _load_group(scale_ptr, zero_ptr, group, out_features, source, ZEROS)
            code = _unpack(words, _subtracted(zero, tl.float32, False), place, tl.float32, False)
            value = (code * scale[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(
                out_ptr + row * in_features + at[None, :], value, mask=there[:, None] & (at < in_features)[None, :]
            )


@dataclass(frozen=True)
class Shape:
    """How a product is cut up.

    Attributes:
        block_out: outputs of a program.
        split: parts of the inputs, of whole tiles.
        stages, warps: of a program.
    """

    block_out: int
    split: int
    stages: int
    warps: int


@cache
def choose_shape(rows: int, out_features: int, in_features: int, device: torch.device) -> Shape:
    """The cut for a size: as many programs as processors hold at once, where a part keeps four tiles at least.

    Two warps: with four, Triton takes the warp-group instruction and carries each left operand through shared memory.
    """
    resident = 8 if rows <= 16 else 4 if rows <= 32 else 2
    wanted = resident * num_multiprocessors(device) / triton.cdiv(out_features, 64)
    most = in_features / (4 * TILE_INPUTS)
    split = 1 << math.floor(math.log2(max(min(wanted, most, 16), 1)))
    return Shape(block_out=64, split=split, stages=5 if rows <= 32 else 4, warps=2)


def w4a16_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """See ``kernels.awq_linear.w4a16_linear``; weights are not rounded to the dtype, and read anew for each 64 rows."""
    x = x.contiguous()
    rows, in_features = x.shape
    groups, out_features = scales.shape
    out = x.new_empty((rows, out_features))
    dependent = dependent_launch(x.device)
    for start in range(0, rows, _BLOCK_ROWS):
        here = min(rows - start, _BLOCK_ROWS)
        cut = shape or choose_shape(here, out_features, in_features, x.device)
        partial, arrived = out, out
        if cut.split > 1:
            partial = torch.empty((cut.split, here, out_features), dtype=torch.float32, device=x.device)
            arrived = arrival_counters(x.device)
        _skinny_kernel[(triton.cdiv(out_features, cut.block_out), cut.split)](
            x[start:], weight, scales, weight if zeros is None else zeros, x if bias is None else bias, out[start:],
            partial, arrived, here, out_features, in_features, groups,
            GROUP_SIZE=group_size, ZEROS=zeros is not None, BIAS=bias is not None,
            BLOCK_ROWS=max(triton.next_power_of_2(here), 8), BLOCK_OUT=cut.block_out, SPLIT=cut.split,
            STAGES=cut.stages, EVEN=in_features % TILE_INPUTS == 0,
            PAIRS=_unpacks_pairs(x.device) and x.dtype != torch.float32, DEPENDENT=dependent, num_warps=cut.warps,
            launch_pdl=dependent,
        )  # fmt: skip
    return out


def dequantize_weight(
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    in_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``kernels.awq_linear.dequantize_weight``, rounded to ``dtype``."""
    out_features = len(weight)
    out = torch.empty((out_features, in_features), dtype=dtype, device=weight.device)
    dependent = dependent_launch(weight.device)
    _dequantize_kernel[(triton.cdiv(out_features, 64), triton.cdiv(in_features, TILE_INPUTS))](
        weight, scales, weight if zeros is None else zeros, out, out_features, in_features,
        GROUP_SIZE=group_size, ZEROS=zeros is not None, BLOCK_OUT=64, DEPENDENT=dependent, launch_pdl=dependent,
    )  # fmt: skip
    return out


@cache
def _unpacks_pairs(device: torch.device) -> bool:
    """Whether the device subtracts pairs of bfloat16 (compute capability 9.0 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

"""Attention of single queries over paged keys (Flash-Decoding: Dao et al., 2023), evenly divided whatever the lengths.

All sequences' keys are cut into tiles, and the tiles, laid end to end, are dealt out in equal shares to as many
programs as the GPU holds at once (as in stream-K: Osama et al., 2023). A program whose share begins or ends within a
sequence leaves a partial result, and a second kernel merges those. Query heads that share a key-value head are computed
together.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.attention_layout import DECODE_TILE, GpuLayout
from kernels.gpu.float8_cache import match_cache, widen
from kernels.gpu.launch import dependent_launch, num_multiprocessors, wait_for_previous

_PROGRAMS_PER_MULTIPROCESSOR = 2
_STAGES = 3
_FLOAT8_STAGES = 5  # they are half as long
_MAX_SHARES = 128


@triton.jit
def _find_sequence(tiles_ptr, tile, num_decodes, STEPS: tl.constexpr):
    """The last sequence whose first tile is at most ``tile`` (unused places, which have no tiles, are passed over)."""
    low = 0
    high = num_decodes
    for _ in range(STEPS):
        middle = (low + high) // 2
        before = (tl.load(tiles_ptr + middle) <= tile) & (middle < num_decodes)
        low = tl.where(before & (low < high), middle + 1, low)
        high = tl.where(before, high, middle)
    return low - 1


@triton.jit(do_not_specialize=["num_decodes"])
def _decode_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, partial_ptr, stats_ptr,
    table_ptr, table_stride, rows_ptr, context_ptr, tiles_ptr, num_decodes, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, COMPILED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    GROUP_PAD: tl.constexpr = 16
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    member = tl.arange(0, GROUP_PAD)
    real = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    wait_for_previous(DEPENDENT)
    total = tl.load(tiles_ptr + num_decodes)
    per_share = tl.cdiv(total, tl.num_programs(1))
    tile = share * per_share
    last_tile = tl.minimum(tile + per_share, total)
    seq = _find_sequence(tiles_ptr, tile, num_decodes, STEPS)
    while tile < last_tile:
        seq_start = tl.load(tiles_ptr + seq)
        seq_end = tl.load(tiles_ptr + seq + 1)
        segment_end = tl.minimum(last_tile, seq_end)
        if segment_end > tile:
            context = tl.load(context_ptr + seq)
            table = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
            head = kv_head * GROUP + member
            query_at = (seq * KV_HEADS * GROUP + head[:, None]) * HEAD_DIM + column[None, :]
            query, factor = match_cache(tl.load(query_ptr + query_at, mask=real, other=0.0), key_ptr)
            largest = tl.full([GROUP_PAD], -1e30, tl.float32)
            total_weight = tl.zeros([GROUP_PAD], tl.float32)
            acc = tl.zeros([GROUP_PAD, BLOCK_D], tl.float32)
            first = tile - seq_start
            if WINDOW > 0:
                first = tl.maximum(first, (context - WINDOW) // TILE)
            for index in tl.range(first, segment_end - seq_start, num_stages=STAGES):
                token = index * TILE + tl.arange(0, TILE)
                visible = token < context
                place = token.to(tl.uint32)  # whose quotients are shifts
                block = tl.load(table + place // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
                slot = block * BLOCK_SIZE + place % BLOCK_SIZE
                at = (slot[:, None] * KV_HEADS + kv_head) * HEAD_DIM + column[None, :]
                read = visible[:, None] & (column < HEAD_DIM)[None, :]
                key = widen(tl.load(key_ptr + at, mask=read, other=0.0), query, COMPILED)
                score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * factor)[:, None]
                if SOFTCAP:
                    score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
                if WINDOW > 0:
                    visible = visible & (token >= context - WINDOW)
                score = tl.where(visible[None, :], score * 1.4426950408889634, -1e30)
                new_largest = tl.maximum(largest, tl.max(score, axis=1))
                shrink = tl.exp2(largest - new_largest)
                weight = tl.where(visible[None, :], tl.exp2(score - new_largest[:, None]), 0.0)
                total_weight = total_weight * shrink + tl.sum(weight, axis=1)
                value = widen(tl.load(value_ptr + at, mask=read, other=0.0), query, COMPILED)
                acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
                largest = new_largest
            if (tile == seq_start) & (segment_end == seq_end):
                out = acc / tl.maximum(total_weight, 1e-30)[:, None]
                tl.store(out_ptr + query_at, out.to(out_ptr.dtype.element_ty), mask=real)
            else:
                # A share has at most two unfinished sequences: one that began before it, and one that goes on after it.
                place = share * 2 + tl.where(tile == seq_start, 1, 0)
                at_part = (place * KV_HEADS * GROUP + head).to(tl.int64)
                tl.store(partial_ptr + at_part[:, None] * HEAD_DIM + column[None, :], acc, mask=real)
                tl.store(stats_ptr + at_part * 2, largest, mask=member < GROUP)
                tl.store(stats_ptr + at_part * 2 + 1, total_weight, mask=member < GROUP)
            tile = segment_end
        seq += 1


@triton.jit(do_not_specialize=["num_decodes"])
def _merge_kernel(
    out_ptr, partial_ptr, stats_ptr, tiles_ptr, num_decodes, shares,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SHARES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    wait_for_previous(DEPENDENT)
    per_share = tl.cdiv(tl.load(tiles_ptr + num_decodes), shares)
    seq_start = tl.load(tiles_ptr + seq)
    seq_end = tl.load(tiles_ptr + seq + 1)
    if seq_end > seq_start:
        first = seq_start // per_share
        last = (seq_end - 1) // per_share
        if last > first:
            share = first + tl.arange(0, SHARES)
            there = share <= last
            at = ((share * 2 + tl.where(share == first, 1, 0)) * HEADS + head).to(tl.int64)
            largest = tl.load(stats_ptr + at * 2, mask=there, other=-1e30)
            factor = tl.exp2(largest - tl.max(largest))
            weight = tl.load(stats_ptr + at * 2 + 1, mask=there, other=0.0) * factor
            read = there[:, None] & (column < HEAD_DIM)[None, :]
            part = tl.load(partial_ptr + at[:, None] * HEAD_DIM + column[None, :], mask=read, other=0.0)
            out = tl.sum(part * factor[:, None], axis=0) / tl.maximum(tl.sum(weight), 1e-30)
            to = out_ptr + (seq * HEADS + head) * HEAD_DIM + column
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def num_shares(kv_heads: int, device: torch.device) -> int:
    """Into how many shares the keys of each key-value head are divided."""
    programs = num_multiprocessors(device) * _PROGRAMS_PER_MULTIPROCESSOR
    return min(max(programs // kv_heads, 1), _MAX_SHARES)


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: GpuLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    """Fills ``out[:layout.num_decodes]``; arguments as in ``kernels.attention.paged_attention``."""
    kv_heads, head_dim = key_cache.shape[2:]
    heads = query.shape[1]
    count = layout.num_decodes
    shares = num_shares(kv_heads, query.device)
    partial = torch.empty((2 * shares, heads, head_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((2 * shares, heads, 2), dtype=torch.float32, device=query.device)
    dependent = dependent_launch(query.device)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    stages = _FLOAT8_STAGES if key_cache.dtype == torch.float8_e4m3fn else _STAGES
    _decode_kernel[(kv_heads, shares)](
        query, key_cache, value_cache, out, partial, stats,
        layout.block_tables, layout.block_tables.stride(0), layout.rows, layout.context_lens, layout.decode_tiles,
        count, scale, softcap or 0.0,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d,
        BLOCK_SIZE=key_cache.shape[1], TILE=DECODE_TILE, WINDOW=window or 0, SOFTCAP=softcap is not None,
        STEPS=11,  # enough for 1,024 sequences
        STAGES=stages, COMPILED=query.is_cuda, DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    _merge_kernel[(count, heads)](
        out, partial, stats, layout.decode_tiles, count, shares,
        HEADS=heads, HEAD_DIM=head_dim, BLOCK_D=block_d, SHARES=triton.next_power_of_2(shares),
        DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip

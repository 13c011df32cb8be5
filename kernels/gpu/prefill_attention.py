"""Causal attention of chunks of queries over paged keys (FlashAttention-2: Dao, 2023), of any lengths in one launch.

Where a step has too few tiles of queries to fill the GPU, the keys that a tile sees are divided among several programs,
and the one that ends last merges what they found (as in FlashDecoding: Dao et al., 2023).
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.attention_layout import PREFILL_TILE, GpuLayout
from kernels.gpu.float8_cache import match_cache
from kernels.gpu.launch import dependent_launch, shared_memory, wait_for_previous
from kernels.gpu.split_sum import arrival_counters


@triton.jit
def _attend_tile(
    acc, total_weight, largest, query, position, index, context,
    table, key_ptr, value_ptr, kv_head, factor, softcap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys in the running softmax.

    ``factor``: of the scores, [queries]. ``MASKED``: some keys are not visible to some queries.
    """
    column = tl.arange(0, BLOCK_D)
    token = index * TILE + tl.arange(0, TILE)
    block = tl.load(table + token // BLOCK_SIZE, mask=token < context, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + token % BLOCK_SIZE
    at = (slot[:, None] * KV_HEADS + kv_head) * HEAD_DIM + column[None, :]
    if BLOCK_D == HEAD_DIM:
        key = tl.load(key_ptr + at).to(query.dtype)
        value = tl.load(value_ptr + at).to(query.dtype)
    else:
        key = tl.load(key_ptr + at, mask=(column < HEAD_DIM)[None, :], other=0.0).to(query.dtype)
        value = tl.load(value_ptr + at, mask=(column < HEAD_DIM)[None, :], other=0.0).to(query.dtype)
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    scale = factor * 1.4426950408889634
    if SOFTCAP:
        score = softcap * (2 * tl.sigmoid(2 * factor[:, None] * score / softcap) - 1) * 1.4426950408889634
        scale = tl.full(factor.shape, 1.0, tl.float32)
    if MASKED:
        visible = token[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (token[None, :] > position[:, None] - WINDOW)
        score = tl.where(visible, score, -1e30)
    # The scale is positive: so it can wait for the subtraction, with which it is one instruction.
    new_largest = tl.maximum(largest, tl.max(score, axis=1) * scale)
    shrink = tl.exp2(largest - new_largest)
    weight = tl.exp2(score * scale[:, None] - new_largest[:, None])
    if MASKED:
        weight = tl.where(visible, weight, 0.0)
    total_weight = total_weight * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, total_weight, new_largest


@triton.jit(do_not_specialize=["num_tiles", "prefill_start"])
def _prefill_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, partial_ptr, stats_ptr, arrived_ptr,
    table_ptr, table_stride, rows_ptr, context_ptr, starts_ptr, tiles_ptr, num_tiles, prefill_start, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, DIVIDED: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # The last tiles see the most keys: they go first, so that the short ones fill the end.
    which = num_tiles - 1 - tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    column = tl.arange(0, BLOCK_D)
    wait_for_previous(DEPENDENT)
    seq = tl.load(tiles_ptr + which)
    if seq < 0:
        return
    begin = tl.load(tiles_ptr + num_tiles + which)
    start = tl.load(starts_ptr + seq)
    count = tl.load(starts_ptr + seq + 1) - start
    start -= prefill_start
    context = tl.load(context_ptr + seq)
    table = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
    within = begin + tl.arange(0, QUERIES)
    position = context - count + within
    real = (within < count)[:, None] & (column < HEAD_DIM)[None, :]
    query_at = ((start + within).to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + column[None, :]
    query, factor = match_cache(tl.load(query_ptr + query_at, mask=real, other=0.0), key_ptr)
    factor *= scale
    largest = tl.full([QUERIES], -1e30, tl.float32)
    total_weight = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    first_position = context - count + begin
    end = tl.cdiv(tl.minimum(first_position + QUERIES, context), TILE)
    plain_end = (first_position + 1) // TILE  # tiles before it are visible to all queries
    low = 0
    plain_start = 0
    if WINDOW > 0:
        # Keys before the first query's window are out of sight of all; those before the last one's, of some.
        low = tl.maximum(first_position - WINDOW + 1, 0) // TILE
        plain_start = tl.cdiv(tl.maximum(first_position + QUERIES - WINDOW, 0), TILE)
        plain_start = tl.minimum(plain_start, end)
    if DIVIDED:
        part = tl.load(tiles_ptr + 2 * num_tiles + which)
        num_parts = tl.load(tiles_ptr + 3 * num_tiles + which)
        each = tl.cdiv(end - low, num_parts)
        low += part * each
        end = tl.minimum(end, low + each)
        plain_start = tl.maximum(plain_start, low)
        plain_end = tl.minimum(plain_end, end)
    if WINDOW > 0:
        for index in tl.range(low, tl.minimum(plain_start, end), num_stages=STAGES):
            acc, total_weight, largest = _attend_tile(
                acc, total_weight, largest, query, position, index, context, table, key_ptr, value_ptr, kv_head,
                factor, softcap, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, True,
            )  # fmt: skip
    for index in tl.range(plain_start, plain_end, num_stages=STAGES):
        acc, total_weight, largest = _attend_tile(
            acc, total_weight, largest, query, position, index, context, table, key_ptr, value_ptr, kv_head,
            factor, softcap, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    for index in tl.range(tl.maximum(plain_start, plain_end), end, num_stages=STAGES):
        acc, total_weight, largest = _attend_tile(
            acc, total_weight, largest, query, position, index, context, table, key_ptr, value_ptr, kv_head,
            factor, softcap, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, True,
        )  # fmt: skip
    complete = True
    if DIVIDED:
        complete = num_parts == 1
        if num_parts > 1:
            row = tl.arange(0, QUERIES)
            place = which * HEADS + head
            at = place.to(tl.int64) * QUERIES + row
            tl.store(partial_ptr + at[:, None] * BLOCK_D + column[None, :], acc)
            tl.store(stats_ptr + at * 2, largest)
            tl.store(stats_ptr + at * 2 + 1, total_weight)
            tl.debug_barrier()
            # The parts of a tile stand one after another.
            first = (which - part) * HEADS + head
            complete = tl.atomic_add(arrived_ptr + first, 1, sem="acq_rel") == num_parts - 1
            if complete:
                tl.store(arrived_ptr + first, 0)
                largest = tl.full([QUERIES], -1e30, tl.float32)
                total_weight = tl.zeros([QUERIES], tl.float32)
                acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
                for other in range(num_parts):
                    at = (first + other * HEADS).to(tl.int64) * QUERIES + row
                    found = tl.load(stats_ptr + at * 2, cache_modifier=".cg")
                    new_largest = tl.maximum(largest, found)
                    shrink, share = tl.exp2(largest - new_largest), tl.exp2(found - new_largest)
                    total_weight *= shrink
                    total_weight += share * tl.load(stats_ptr + at * 2 + 1, cache_modifier=".cg")
                    theirs = tl.load(partial_ptr + at[:, None] * BLOCK_D + column[None, :], cache_modifier=".cg")
                    acc = acc * shrink[:, None] + theirs * share[:, None]
                    largest = new_largest
    if complete:
        out = acc / tl.maximum(total_weight, 1e-30)[:, None]
        tl.store(out_ptr + query_at, out.to(out_ptr.dtype.element_ty), mask=real)


def _keys_at_once(block_d: int, device: torch.device) -> int:
    """Keys of a tile: as many as fit, of two tiles of keys and values beside the queries, in 16 bits."""
    fitting = (keys for keys in (128, 64) if (4 * keys + PREFILL_TILE) * block_d * 2 <= shared_memory(device))
    return 32 if block_d > 128 else next(fitting, 32)


def prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: GpuLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    """Fills ``out`` where sequences with several tokens are; their keys are in the cache already. It begins, as
    ``query`` does, at the token ``layout.prefill_start``.

    Other arguments as in ``kernels.attention.paged_attention``.
    """
    kv_heads, head_dim = key_cache.shape[2:]
    heads = query.shape[1]
    num_tiles = layout.prefill_tiles.shape[1]
    dependent = dependent_launch(query.device)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    single = query.dtype == torch.float32
    partial, stats, arrived = query, query, query
    if layout.divided:
        places = min(num_tiles, layout.divided) * heads
        partial = torch.empty((places * PREFILL_TILE, block_d), dtype=torch.float32, device=query.device)
        stats = torch.empty((places * PREFILL_TILE, 2), dtype=torch.float32, device=query.device)
        arrived = arrival_counters(query.device)
        assert places <= len(arrived)
    _prefill_kernel[(heads, num_tiles)](
        query, key_cache, value_cache, out, partial, stats, arrived,
        layout.block_tables, layout.block_tables.stride(0), layout.rows, layout.context_lens, layout.query_starts,
        layout.prefill_tiles, num_tiles, layout.prefill_start, scale, softcap or 0.0,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d,
        BLOCK_SIZE=key_cache.shape[1], QUERIES=PREFILL_TILE,
        TILE=32 if single else _keys_at_once(block_d, query.device), WINDOW=window or 0, SOFTCAP=softcap is not None,
        DIVIDED=layout.divided > 0, STAGES=2 if single else 3, DEPENDENT=dependent, num_warps=8, launch_pdl=dependent,
    )  # fmt: skip

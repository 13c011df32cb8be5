"""Rotation, cache write and attention of single queries over paged keys, in one kernel (Flash-Decoding: Dao et al.,
2023), evenly divided whatever the lengths.

All sequences' keys are cut into tiles, and the tiles, laid end to end, are dealt out in equal shares to as many
programs as the GPU holds at once (as in stream-K: Osama et al., 2023). A program whose share begins or ends within a
sequence leaves a partial result; of a sequence's programs the one that ends last merges those. Query heads that share a
key-value head are computed together. The newest token's key and value are taken from the projection, and written to
the cache by the program that has the sequence's last tile.

Keys at the beginning of a sequence that its group has read (see ``kernels.gpu.shared_prefix_attention``) have no tiles
here: the program that has the last one begins with what the group left, too.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.attention_layout import DECODE_TILE, PREFIX_MEMBERS, GpuLayout
from kernels.gpu.float8_cache import match_cache, split_pairs
from kernels.gpu.launch import dependent_launch, num_multiprocessors, prefetch
from kernels.gpu.rotary_kv import pairs, rotate_heads
from kernels.rotary_kv import HeadNorms

# By the bytes of a cached number. Half of the stages are the block tables', which are read ahead of the keys.
_PROGRAMS_PER_MULTIPROCESSOR = 2
_STAGES = {1: 5, 2: 5, 4: 3}
_KEYS = {1: 128, 2: 64, 4: 64}  # that are read at once
_MAX_SHARES = 128
_MOST_COUNTERS = 1 << 16
PrefixParts = tuple[torch.Tensor, torch.Tensor]
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


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


@triton.jit
def _places(table, token, last, strides, kv_head, BLOCK_SIZE: tl.constexpr):
    """Where the tokens' keys begin in the cache, [tokens] int64; of those after ``last``, where that one's does."""
    place = tl.minimum(token, last).to(tl.uint32)  # whose quotients are shifts
    block = tl.load(table + place // BLOCK_SIZE).to(tl.int64)
    block_stride, token_stride, head_stride = strides
    return block * block_stride + (place % BLOCK_SIZE).to(tl.int64) * token_stride + kv_head * head_stride


@triton.jit
def capped_score(score, factor, softcap, SOFTCAP: tl.constexpr):
    """Products as scores to the base 2."""
    score = score * factor
    if SOFTCAP:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
    return score * _LOG2_E


@triton.jit
def _add_parts(
    acc, total_weight, largest, partial_ptr, stats_ptr, place, there, head, real,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds partial results to a running softmax.

    Args:
        acc, total_weight, largest: of the softmax: [heads, BLOCK_D], [heads] and [heads].
        place: [n], where the parts are; ``there``: [n], which of them there are.
        head: [heads]; ``real``: [heads], which of them there are.
    """
    column = tl.arange(0, BLOCK_D)
    there = there[:, None] & real[None, :]
    at = place[:, None] * HEADS + head[None, :]
    read = there[:, :, None] & (column < HEAD_DIM)[None, None, :]
    from_ = partial_ptr + at.to(tl.int64)[:, :, None] * HEAD_DIM + column[None, None, :]
    part = tl.load(from_, mask=read, other=0.0, cache_modifier=".cg")
    part_largest = tl.load(stats_ptr + at * 2, mask=there, other=-1e30, cache_modifier=".cg")
    weight = tl.load(stats_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    new_largest = tl.maximum(largest, tl.max(part_largest, axis=0))
    shrink = tl.exp2(largest - new_largest)
    factor = tl.exp2(part_largest - new_largest[None, :])
    total_weight = total_weight * shrink + tl.sum(weight * factor, axis=0)
    acc = acc * shrink[:, None] + tl.sum(part * factor[:, :, None], axis=0)
    return acc, total_weight, new_largest


@triton.jit
def _merge(
    out_ptr, partial_ptr, stats_ptr, seq, kv_head, first, last,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merges what shares ``first`` to ``last`` left of a sequence, ``AT_ONCE`` of them at a time."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_D)
    largest = tl.full([GROUP_PAD], -1e30, tl.float32)
    total_weight = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, BLOCK_D], tl.float32)
    for begin in range(first, last + 1, AT_ONCE):
        share = begin + tl.arange(0, AT_ONCE)
        place = share * 2 + tl.where(share == first, 1, 0)  # in its first share a sequence has the second place
        acc, total_weight, largest = _add_parts(
            acc, total_weight, largest, partial_ptr, stats_ptr, place, share <= last, head, member < GROUP,
            HEADS, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    out = acc / tl.maximum(total_weight, 1e-30)[:, None]
    to = out_ptr + (seq * HEADS + head[:, None]) * HEAD_DIM + column[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=(member < GROUP)[:, None] & (column < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["num_decodes"])
def _decode_kernel(
    qkv_ptr, cos_ptr, sin_ptr, slot_ptr, q_norm_ptr, k_norm_ptr, eps, offset,
    key_ptr, value_ptr, new_key_ptr, new_value_ptr, block_stride, token_stride, head_stride,
    out_ptr, partial_ptr, stats_ptr, arrived_ptr,
    table_ptr, table_stride, rows_ptr, context_ptr, tiles_ptr, num_decodes, scale, softcap,
    prefix_ptr, prefix_partial_ptr, prefix_stats_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FLOAT8: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    GROUP_MERGE: tl.constexpr, AT_ONCE: tl.constexpr, PREFIXES: tl.constexpr, PREFIX_MEMBERS: tl.constexpr,
    PREFIXES_AT_ONCE: tl.constexpr, COMPILED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    # With FLOAT8, ``key_ptr`` and ``value_ptr`` are to pairs of neighbours; HEAD_DIM and strides count elements.
    GROUP_PAD: tl.constexpr = 16
    HEADS: tl.constexpr = KV_HEADS * GROUP
    PACK: tl.constexpr = 2 if FLOAT8 else 1
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    unit = tl.arange(0, BLOCK_D // PACK)
    member = tl.arange(0, GROUP_PAD)
    real = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    strides = (block_stride // PACK, token_stride // PACK, head_stride // PACK)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(tiles_ptr + num_decodes)
    per_share = tl.maximum(tl.cdiv(total, tl.num_programs(1)), 1)
    tile = share * per_share
    last_tile = tl.minimum(tile + per_share, total)
    seq = _find_sequence(tiles_ptr, tile, num_decodes, STEPS)
    if DEPENDENT:
        ALIGNED: tl.constexpr = HEAD_DIM * new_key_ptr.dtype.element_ty.primitive_bitwidth % 128 == 0
        if ALIGNED and tile < last_tile:
            # The first keys and values are fetched while the kernel before still runs.
            context = tl.load(context_ptr + seq)
            table = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
            index = tile - tl.load(tiles_ptr + seq)
            if WINDOW > 0:
                index = tl.maximum(index, (context - WINDOW) // TILE)
            token = index * TILE + tl.arange(0, TILE)
            if PREFIXES:
                token += tl.load(prefix_ptr + seq)
            at = _places(table, token, context - 1, strides, kv_head, BLOCK_SIZE)
            sizes = tl.full([TILE], HEAD_DIM * new_key_ptr.dtype.element_ty.primitive_bitwidth // 8, tl.int32)
            prefetch(key_ptr + at, sizes)
            prefetch(value_ptr + at, sizes)
        tl.extra.cuda.gdc_wait()
    partner, angle, sign = pairs(column, HALF)
    q_weight, q_other, k_weight, k_other = column, column, column, column
    if NORM:
        inside = (column < HEAD_DIM)[None, :]
        q_weight = tl.load(q_norm_ptr + column[None, :], mask=inside, other=0.0)
        q_other = tl.load(q_norm_ptr + partner[None, :], mask=inside, other=0.0)
        k_weight = tl.load(k_norm_ptr + column[None, :], mask=inside, other=0.0)
        k_other = tl.load(k_norm_ptr + partner[None, :], mask=inside, other=0.0)
    while tile < last_tile:
        seq_start = tl.load(tiles_ptr + seq)
        seq_end = tl.load(tiles_ptr + seq + 1)
        segment_end = tl.minimum(last_tile, seq_end)
        if segment_end > tile:
            context = tl.load(context_ptr + seq)
            table = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
            projected = qkv_ptr + seq * (HEADS + 2 * KV_HEADS) * HEAD_DIM
            rotated = column < 2 * HALF
            cos = tl.load(cos_ptr + seq * HALF + angle, mask=rotated, other=1.0)[None, :]
            sin = tl.load(sin_ptr + seq * HALF + angle, mask=rotated, other=0.0)[None, :] * sign[None, :]
            head = kv_head * GROUP + member
            raw = tl.load(projected + head[:, None] * HEAD_DIM + column[None, :], mask=real, other=0.0)
            other = tl.load(projected + head[:, None] * HEAD_DIM + partner[None, :], mask=real, other=0.0)
            query = rotate_heads(raw, other, q_weight, q_other, cos, sin, eps, offset, HEAD_DIM, NORM, OFFSET)

            # The newest token's key and value: the first ones of the softmax, for who has the sequence's last tile.
            inside = (column < HEAD_DIM)[None, :]
            at_key = projected + (HEADS + kv_head) * HEAD_DIM
            raw = tl.load(at_key + column[None, :], mask=inside, other=0.0)
            other = tl.load(at_key + partner[None, :], mask=inside, other=0.0)
            new_key = rotate_heads(raw, other, k_weight, k_other, cos, sin, eps, offset, HEAD_DIM, NORM, OFFSET)
            new_value = tl.load(at_key + KV_HEADS * HEAD_DIM + column[None, :], mask=inside, other=0.0)
            if FLOAT8:
                new_key = tl.clamp(new_key.to(tl.float32), -448.0, 448.0)
                new_value = tl.clamp(new_value.to(tl.float32), -448.0, 448.0)
            new_key = new_key.to(new_key_ptr.dtype.element_ty)
            new_value = new_value.to(new_key_ptr.dtype.element_ty)
            owns = segment_end == seq_end
            slot = tl.load(slot_ptr + seq)
            to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride + kv_head * head_stride
            stored = inside & (slot >= 0) & owns
            tl.store(new_key_ptr + to + column[None, :], new_key, mask=stored)
            tl.store(new_value_ptr + to + column[None, :], new_value, mask=stored)
            new_score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), axis=1)
            largest = tl.where(owns, capped_score(new_score, scale, softcap, SOFTCAP), -1e30)
            total_weight = tl.where(owns, 1.0, 0.0) + tl.zeros([GROUP_PAD], tl.float32)
            acc = tl.where(owns, new_value.to(tl.float32), 0.0) + tl.zeros([GROUP_PAD, BLOCK_D], tl.float32)
            if PREFIXES:
                num_parts = tl.where(owns, tl.load(prefix_ptr + num_decodes + seq), 0)
                first_place = tl.load(prefix_ptr + 2 * num_decodes + seq)
                for begin in range(0, num_parts, PREFIXES_AT_ONCE):
                    part = begin + tl.arange(0, PREFIXES_AT_ONCE)
                    acc, total_weight, largest = _add_parts(
                        acc, total_weight, largest, prefix_partial_ptr, prefix_stats_ptr,
                        first_place + part * PREFIX_MEMBERS, part < num_parts, head, member < GROUP,
                        HEADS, HEAD_DIM, BLOCK_D,
                    )  # fmt: skip

            factor = tl.full([GROUP_PAD], 1.0, tl.float32)
            query_odd, acc_odd = query, acc
            if FLOAT8:
                query, factor = match_cache(query, new_key_ptr)
                query, query_odd = tl.split(tl.reshape(query, [GROUP_PAD, BLOCK_D // 2, 2]))
                acc, acc_odd = tl.split(tl.reshape(acc, [GROUP_PAD, BLOCK_D // 2, 2]))
            factor *= scale
            first = (tile - seq_start) * TILE
            end = (segment_end - seq_start) * TILE
            if PREFIXES:
                shared = tl.load(prefix_ptr + seq)
                first += shared
                end += shared
            end = tl.minimum(end, context - 1)
            if WINDOW > 0:
                first = tl.maximum(first, (context - WINDOW) // TILE * TILE)
            for start in tl.range(first, end, KEYS, num_stages=STAGES):
                token = start + tl.arange(0, KEYS)
                visible = token < end
                at = _places(table, token, end - 1, strides, kv_head, BLOCK_SIZE)[:, None] + unit[None, :]
                read = visible[:, None] & (unit < HEAD_DIM // PACK)[None, :]
                key = tl.load(key_ptr + at, mask=read, other=0)
                if FLOAT8:
                    even, odd = split_pairs(key, query.dtype, COMPILED)
                    score = tl.dot(query, tl.trans(even), input_precision="ieee")
                    score = tl.dot(query_odd, tl.trans(odd), score, input_precision="ieee")
                else:
                    score = tl.dot(query, tl.trans(key), input_precision="ieee")
                score = capped_score(score, factor[:, None], softcap, SOFTCAP)
                if WINDOW > 0:
                    visible = visible & (token >= context - WINDOW)
                score = tl.where(visible[None, :], score, -1e30)
                new_largest = tl.maximum(largest, tl.max(score, axis=1))
                shrink = tl.exp2(largest - new_largest)
                weight = tl.where(visible[None, :], tl.exp2(score - new_largest[:, None]), 0.0)
                total_weight = total_weight * shrink + tl.sum(weight, axis=1)
                value = tl.load(value_ptr + at, mask=read, other=0)
                if FLOAT8:
                    even, odd = split_pairs(value, query.dtype, COMPILED)
                    weight = weight.to(even.dtype)
                    acc = tl.dot(weight, even, acc * shrink[:, None], input_precision="ieee")
                    acc_odd = tl.dot(weight, odd, acc_odd * shrink[:, None], input_precision="ieee")
                else:
                    acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
                largest = new_largest
            if FLOAT8:
                acc = tl.reshape(tl.join(acc, acc_odd), [GROUP_PAD, BLOCK_D])
            if (tile == seq_start) & owns:
                out = acc / tl.maximum(total_weight, 1e-30)[:, None]
                to_out = out_ptr + (seq * HEADS + head[:, None]) * HEAD_DIM + column[None, :]
                tl.store(to_out, out.to(out_ptr.dtype.element_ty), mask=real)
            else:
                # A share has at most two unfinished sequences: one that began before it, and one that goes on after it.
                place = share * 2 + tl.where(tile == seq_start, 1, 0)
                at_part = (place * HEADS + head).to(tl.int64)
                tl.store(partial_ptr + at_part[:, None] * HEAD_DIM + column[None, :], acc, mask=real)
                tl.store(stats_ptr + at_part * 2, largest, mask=member < GROUP)
                tl.store(stats_ptr + at_part * 2 + 1, total_weight, mask=member < GROUP)
                tl.debug_barrier()
                first_share = seq_start // per_share
                last_share = (seq_end - 1) // per_share
                counter = arrived_ptr + seq * KV_HEADS + kv_head
                if tl.atomic_add(counter, 1, sem="acq_rel") == last_share - first_share:
                    tl.store(counter, 0)
                    _merge(
                        out_ptr, partial_ptr, stats_ptr, seq, kv_head, first_share, last_share,
                        KV_HEADS, GROUP, GROUP_MERGE, HEAD_DIM, BLOCK_D, AT_ONCE,
                    )  # fmt: skip
            tile = segment_end
        seq += 1


def num_shares(kv_heads: int, device: torch.device) -> int:
    """Into how many shares the keys of each key-value head are divided."""
    programs = num_multiprocessors(device) * _PROGRAMS_PER_MULTIPROCESSOR
    return min(max(programs // kv_heads, 1), _MAX_SHARES)


_counters: dict[torch.device, torch.Tensor] = {}


def _arrived(device: torch.device) -> torch.Tensor:
    """Counters of ended shares, zero between kernels."""
    if device not in _counters:
        _counters[device] = torch.zeros(_MOST_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]


def decode_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: GpuLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    norms: HeadNorms | None,
    prefixes: PrefixParts | None,
    out: torch.Tensor,
) -> None:
    """Fills ``out[:layout.num_decodes]``, [tokens, heads, head_dim], and the decoding tokens' slots.

    No sequence may see a token that another one computes in this step. ``prefixes`` is what groups left of the keys of
    ``layout.prefixes``, which layers with a window cannot use; with None, all keys are read here. Other arguments as in
    ``kernels.rotary_attention``, for which ``qkv``, ``cos`` and ``sin`` begin with the decoding tokens.
    """
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    heads = out.shape[1]
    itemsize = key_cache.dtype.itemsize
    shares = num_shares(kv_heads, qkv.device)
    partial = torch.empty((2 * shares, heads, head_dim), dtype=torch.float32, device=qkv.device)
    stats = torch.empty((2 * shares, heads, 2), dtype=torch.float32, device=qkv.device)
    dependent = dependent_launch(qkv.device)
    float8 = itemsize == 1
    block_d = max(triton.next_power_of_2(head_dim), 16)
    keys, values = (cache.view(torch.int16) if float8 else cache for cache in (key_cache, value_cache))
    group_merge = triton.next_power_of_2(heads // kv_heads)
    shared = layout.prefixes if prefixes is not None else None
    tiles = layout.decode_tiles if shared is None else shared.own_tiles
    assert layout.num_decodes * kv_heads <= _MOST_COUNTERS
    _decode_kernel[(kv_heads, shares)](
        qkv, cos, sin, layout.slot_mapping, norms.query if norms else qkv, norms.key if norms else qkv,
        norms.eps if norms else 0.0, norms.offset if norms else 0.0,
        keys, values, key_cache, value_cache, *key_cache.stride()[:3],
        out, partial, stats, _arrived(qkv.device),
        layout.block_tables, layout.block_tables.stride(0), layout.rows, layout.context_lens, tiles,
        layout.num_decodes, scale, softcap or 0.0,
        tiles if shared is None else shared.sequences, *(prefixes or (partial, stats)),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, HALF=cos.shape[-1], BLOCK_D=block_d,
        BLOCK_SIZE=block_size, TILE=DECODE_TILE, KEYS=_KEYS[itemsize], WINDOW=window or 0, SOFTCAP=softcap is not None,
        FLOAT8=float8, NORM=norms is not None, OFFSET=norms is not None and norms.offset != 0,
        STEPS=11,  # enough for 1,024 sequences
        STAGES=_STAGES[itemsize], GROUP_MERGE=group_merge,
        AT_ONCE=max(8192 // (group_merge * block_d), 1),
        PREFIXES=shared is not None, PREFIX_MEMBERS=PREFIX_MEMBERS, PREFIXES_AT_ONCE=max(8192 // (16 * block_d), 1),
        COMPILED=qkv.is_cuda, DEPENDENT=dependent,
        num_warps=4, launch_pdl=dependent,
    )  # fmt: skip

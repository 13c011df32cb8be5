"""Attention of decoding sequences to keys that they share, read once for all of them (Hydragen: Juravsky et al., 2024;
cascade inference: Ye et al., 2024).

The members' queries are the rows of one product with the shared keys, which all of them see: there is no causality.
What each part of the keys gives stays unnormalised, for ``decode_attention`` to add to the sequences' own keys.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.attention_layout import PREFIX_MEMBERS, GpuLayout
from kernels.gpu.decode_attention import PrefixParts, capped_score
from kernels.gpu.float8_cache import match_cache
from kernels.gpu.launch import dependent_launch, shared_memory, wait_for_previous
from kernels.gpu.rotary_kv import pairs, rotate_heads
from kernels.rotary_kv import HeadNorms

# By the bytes of a query's number. Half of the stages are the block tables', which are read ahead of the keys.
_KEYS = {2: (64, 32), 4: (32,)}  # that are read at once, where there is room
_STAGES = {2: 4, 4: 2}


@triton.jit(do_not_specialize=["num_parts"])
def _prefix_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, eps, offset, key_ptr, value_ptr, partial_ptr, stats_ptr,
    table_ptr, table_stride, rows_ptr, members_ptr, parts_ptr, num_parts, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MEMBERS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    wait_for_previous(DEPENDENT)
    begin = tl.load(parts_ptr + num_parts + part)
    end = tl.load(parts_ptr + 2 * num_parts + part)
    if begin < end:
        members = members_ptr + tl.load(parts_ptr + part) * MEMBERS
        row = tl.arange(0, ROWS)  # a head of a member
        seq = tl.load(members + row // GROUP, mask=row < MEMBERS * GROUP, other=-1)
        there = seq >= 0
        seq = tl.maximum(seq, 0)
        head = kv_head * GROUP + row % GROUP
        column = tl.arange(0, BLOCK_D)
        real = there[:, None] & (column < HEAD_DIM)[None, :]
        partner, angle, sign = pairs(column, HALF)
        rotated = there[:, None] & (column < 2 * HALF)[None, :]
        cos = tl.load(cos_ptr + seq[:, None] * HALF + angle[None, :], mask=rotated, other=1.0)
        sin = tl.load(sin_ptr + seq[:, None] * HALF + angle[None, :], mask=rotated, other=0.0) * sign[None, :]
        query_at = qkv_ptr + (seq * (HEADS + 2 * KV_HEADS) + head)[:, None] * HEAD_DIM
        raw = tl.load(query_at + column[None, :], mask=real, other=0.0)
        other = tl.load(query_at + partner[None, :], mask=real, other=0.0)
        weight, other_weight = column, column
        if NORM:
            inside = (column < HEAD_DIM)[None, :]
            weight = tl.load(q_norm_ptr + column[None, :], mask=inside, other=0.0)
            other_weight = tl.load(q_norm_ptr + partner[None, :], mask=inside, other=0.0)
        query = rotate_heads(raw, other, weight, other_weight, cos, sin, eps, offset, HEAD_DIM, NORM, OFFSET)
        query, factor = match_cache(query, key_ptr)
        factor *= scale

        table = table_ptr + tl.load(rows_ptr + tl.load(members)).to(tl.int64) * table_stride
        largest = tl.full([ROWS], -1e30, tl.float32)
        total_weight = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for start in tl.range(begin, end, KEYS, num_stages=STAGES):
            token = (start + tl.arange(0, KEYS)).to(tl.uint32)  # whose quotients are shifts
            block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + (token % BLOCK_SIZE).to(tl.int64)
            at = (slot[:, None] * KV_HEADS + kv_head) * HEAD_DIM + column[None, :]
            if BLOCK_D == HEAD_DIM:
                key = tl.load(key_ptr + at).to(query.dtype)
                value = tl.load(value_ptr + at).to(query.dtype)
            else:
                key = tl.load(key_ptr + at, mask=(column < HEAD_DIM)[None, :], other=0.0).to(query.dtype)
                value = tl.load(value_ptr + at, mask=(column < HEAD_DIM)[None, :], other=0.0).to(query.dtype)
            score = tl.dot(query, tl.trans(key), input_precision="ieee")
            score = capped_score(score, factor[:, None], softcap, SOFTCAP)
            new_largest = tl.maximum(largest, tl.max(score, axis=1))
            shrink = tl.exp2(largest - new_largest)
            weights = tl.exp2(score - new_largest[:, None])
            total_weight = total_weight * shrink + tl.sum(weights, axis=1)
            acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
            largest = new_largest
        at_part = (part * MEMBERS + row // GROUP).to(tl.int64) * HEADS + head
        tl.store(partial_ptr + at_part[:, None] * HEAD_DIM + column[None, :], acc, mask=real)
        tl.store(stats_ptr + at_part * 2, largest, mask=there)
        tl.store(stats_ptr + at_part * 2 + 1, total_weight, mask=there)


def _keys_at_once(rows: int, block_d: int, itemsize: int, device: torch.device) -> int:
    """Keys of a step of the loop: as many as fit, of two such tiles of keys and of values beside the queries."""
    fitting = (keys for keys in _KEYS[itemsize] if (rows + 4 * keys) * block_d * itemsize < shared_memory(device))
    return next(fitting, 16)


def shared_prefix_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: GpuLayout,
    scale: float,
    softcap: float | None,
    norms: HeadNorms | None,
) -> PrefixParts:
    """Attends to the shared keys of ``layout.prefixes``, which must be in the cache. Arguments as in
    ``kernels.rotary_attention``, for a layer without a window.

    Returns:
        (sums, stats), both float32, of each part and place in its tile: [parts * PREFIX_MEMBERS, heads, head_dim], the
        values weighted; [parts * PREFIX_MEMBERS, heads, 2], the largest score, to the base 2, and the sum of weights.
    """
    assert layout.prefixes is not None
    members, parts = layout.prefixes.members, layout.prefixes.parts
    block_size, kv_heads, head_dim = key_cache.shape[1:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    places = parts.shape[1] * PREFIX_MEMBERS
    sums = torch.empty((places, heads, head_dim), dtype=torch.float32, device=qkv.device)
    stats = torch.empty((places, heads, 2), dtype=torch.float32, device=qkv.device)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    rows = triton.next_power_of_2(PREFIX_MEMBERS * (heads // kv_heads))
    dependent = dependent_launch(qkv.device)
    _prefix_kernel[(kv_heads, parts.shape[1])](
        qkv, cos, sin, norms.query if norms else qkv, norms.eps if norms else 0.0, norms.offset if norms else 0.0,
        key_cache, value_cache, sums, stats,
        layout.block_tables, layout.block_tables.stride(0), layout.rows, members, parts, parts.shape[1],
        scale, softcap or 0.0,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, HALF=cos.shape[-1], BLOCK_D=block_d,
        BLOCK_SIZE=block_size, MEMBERS=PREFIX_MEMBERS, ROWS=rows,
        KEYS=_keys_at_once(rows, block_d, qkv.itemsize, qkv.device), SOFTCAP=softcap is not None,
        NORM=norms is not None, OFFSET=norms is not None and norms.offset != 0, STAGES=_STAGES[qkv.itemsize],
        DEPENDENT=dependent, num_warps=4 if rows * block_d <= 8192 else 8, launch_pdl=dependent,
    )  # fmt: skip
    return sums, stats

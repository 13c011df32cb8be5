"""From the fused projection to attention's inputs in one pass: head norms, rotation, and the write into the cache."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import dependent_launch, wait_for_previous
from kernels.rotary_kv import HeadNorms

_HEADS = 8  # heads of one token in each program


@triton.jit
def pairs(column, HALF: tl.constexpr):
    """Of each element of a head, its partner in the rotated pair, the index of the pair's angle, and the sign of the
    partner's part; elements from ``2 * HALF`` on are not rotated."""
    partner = tl.where(column < HALF, column + HALF, tl.where(column < 2 * HALF, column - HALF, column))
    return partner, tl.where(column < HALF, column, column - HALF), tl.where(column < HALF, -1.0, 1.0)


@triton.jit
def rotate_heads(
    raw, other_raw, weight, other_weight, cos, sin, eps, offset,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of heads, [heads, BLOCK_D], of which elements beyond ``HEAD_DIM`` are zero.

    Args:
        raw, other_raw: the heads, and the partners of their elements.
        weight, other_weight: of the norm, the same; unused without ``NORM``.
        cos, sin: [1, BLOCK_D] float32 of each element's pair, the sign included.
    """
    x, other = raw.to(tl.float32), other_raw.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        if OFFSET:
            normed = x * scale * (offset + weight.to(tl.float32))
            other_normed = other * scale * (offset + other_weight.to(tl.float32))
        else:
            normed = (x * scale).to(raw.dtype) * weight
            other_normed = (other * scale).to(raw.dtype) * other_weight
        x, other = normed.to(raw.dtype).to(tl.float32), other_normed.to(raw.dtype).to(tl.float32)
    return (x * cos + other * sin).to(raw.dtype)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _rotary_kv_kernel(
    qkv_ptr, cos_ptr, sin_ptr, slot_ptr, q_norm_ptr, k_norm_ptr, query_ptr, key_cache_ptr, value_cache_ptr,
    eps, offset,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_D)
    partner, angle, sign = pairs(column, HALF)
    rotated = column < 2 * HALF
    is_query = (head < QUERY_HEADS)[:, None]
    is_value = (head >= QUERY_HEADS + KV_HEADS)[:, None]
    is_key = (head >= QUERY_HEADS)[:, None] & (head < QUERY_HEADS + KV_HEADS)[:, None]
    inside = (head < QUERY_HEADS + 2 * KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    wait_for_previous(DEPENDENT)

    source = qkv_ptr + token * (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM + head[:, None] * HEAD_DIM
    raw = tl.load(source + column[None, :], mask=inside, other=0.0)
    other_raw = tl.load(source + partner[None, :], mask=inside, other=0.0)
    weight, other_weight = raw, other_raw
    if NORM:
        real = (column < HEAD_DIM)[None, :]
        q_weight = tl.load(q_norm_ptr + column[None, :], mask=real, other=0.0)
        k_weight = tl.load(k_norm_ptr + column[None, :], mask=real, other=0.0)
        q_other = tl.load(q_norm_ptr + partner[None, :], mask=real, other=0.0)
        k_other = tl.load(k_norm_ptr + partner[None, :], mask=real, other=0.0)
        weight = tl.where(is_query, q_weight, k_weight)
        other_weight = tl.where(is_query, q_other, k_other)
    cos = tl.load(cos_ptr + token * HALF + angle, mask=rotated, other=1.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + angle, mask=rotated, other=0.0)[None, :] * sign[None, :]
    turned = rotate_heads(raw, other_raw, weight, other_weight, cos, sin, eps, offset, HEAD_DIM, NORM, OFFSET)
    out = tl.where(is_value, raw, turned)

    to_query = query_ptr + (token * QUERY_HEADS + head[:, None]) * HEAD_DIM + column[None, :]
    tl.store(to_query, out, mask=inside & is_query)
    slot = tl.load(slot_ptr + token)
    stored = inside & (column < tl.where(slot >= 0, HEAD_DIM, 0))[None, :]
    if key_cache_ptr.dtype.element_ty == tl.float8e4nv:
        out = tl.clamp(out.to(tl.float32), -448.0, 448.0)
    to_key = (slot * KV_HEADS + head[:, None] - QUERY_HEADS) * HEAD_DIM + column[None, :]
    tl.store(key_cache_ptr + to_key, out.to(key_cache_ptr.dtype.element_ty), mask=stored & is_key)
    to_value = (slot * KV_HEADS + head[:, None] - QUERY_HEADS - KV_HEADS) * HEAD_DIM + column[None, :]
    tl.store(value_cache_ptr + to_value, out.to(value_cache_ptr.dtype.element_ty), mask=stored & is_value)


def rotary_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """See ``kernels.rotary_kv.rotary_kv``."""
    tokens, width = qkv.shape
    kv_heads, head_dim = key_cache.shape[2:]
    query_heads = width // head_dim - 2 * kv_heads
    query = qkv.new_empty((tokens, query_heads, head_dim))
    if tokens:
        dependent = dependent_launch(qkv.device)
        _rotary_kv_kernel[(tokens, triton.cdiv(width // head_dim, _HEADS))](
            qkv, cos, sin, slot_mapping, norms.query if norms else qkv, norms.key if norms else qkv,
            query, key_cache, value_cache,
            norms.eps if norms else 0.0, norms.offset if norms else 0.0,
            QUERY_HEADS=query_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=cos.shape[-1],
            NORM=norms is not None, OFFSET=norms is not None and norms.offset != 0,
            HEADS=_HEADS, BLOCK_D=triton.next_power_of_2(head_dim),
            DEPENDENT=dependent, launch_pdl=dependent,
        )  # fmt: skip
    return query

"""From the fused projection to attention's inputs in one pass: head norms, rotation, and the write into the cache."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import dependent_launch, wait_for_previous

_HEADS = 8  # heads of one token in each program


@triton.jit
def _rotary_kv_kernel(
    qkv_ptr, cos_ptr, sin_ptr, slot_ptr, q_norm_ptr, k_norm_ptr, query_ptr, key_cache_ptr, value_cache_ptr,
    eps, offset,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_D)
    # The other element of each rotated pair, and the index of the pair's angle.
    partner = tl.where(column < HALF, column + HALF, tl.where(column < 2 * HALF, column - HALF, column))
    angle = tl.where(column < HALF, column, column - HALF)
    sign = tl.where(column < HALF, -1.0, 1.0)
    rotated = column < 2 * HALF
    is_query = (head < QUERY_HEADS)[:, None]
    is_value = (head >= QUERY_HEADS + KV_HEADS)[:, None]
    is_key = (head >= QUERY_HEADS)[:, None] & (head < QUERY_HEADS + KV_HEADS)[:, None]
    inside = (head < QUERY_HEADS + 2 * KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    wait_for_previous(DEPENDENT)

    source = qkv_ptr + token * (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM + head[:, None] * HEAD_DIM
    raw = tl.load(source + column[None, :], mask=inside, other=0.0)
    other_raw = tl.load(source + partner[None, :], mask=inside, other=0.0)
    x, other = raw.to(tl.float32), other_raw.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        real = (column < HEAD_DIM)[None, :]
        q_weight = tl.load(q_norm_ptr + column[None, :], mask=real, other=0.0)
        k_weight = tl.load(k_norm_ptr + column[None, :], mask=real, other=0.0)
        q_other = tl.load(q_norm_ptr + partner[None, :], mask=real, other=0.0)
        k_other = tl.load(k_norm_ptr + partner[None, :], mask=real, other=0.0)
        weight = tl.where(is_query, q_weight, k_weight)
        other_weight = tl.where(is_query, q_other, k_other)
        if OFFSET:
            normed = x * scale * (offset + weight.to(tl.float32))
            other_normed = other * scale * (offset + other_weight.to(tl.float32))
        else:
            normed = (x * scale).to(raw.dtype) * weight
            other_normed = (other * scale).to(raw.dtype) * other_weight
        x = tl.where(is_value, x, normed.to(raw.dtype).to(tl.float32))
        other = tl.where(is_value, other, other_normed.to(raw.dtype).to(tl.float32))
    cos = tl.load(cos_ptr + token * HALF + angle, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + token * HALF + angle, mask=rotated, other=0.0)
    turned = x * cos[None, :] + other * (sin * sign)[None, :]
    out = tl.where(is_value, x, turned).to(raw.dtype)

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
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    offset: float,
) -> torch.Tensor:
    """See ``kernels.rotary_kv.rotary_kv``."""
    tokens, width = qkv.shape
    kv_heads, head_dim = key_cache.shape[2:]
    query_heads = width // head_dim - 2 * kv_heads
    query = qkv.new_empty((tokens, query_heads, head_dim))
    if tokens:
        dependent = dependent_launch(qkv.device)
        _rotary_kv_kernel[(tokens, triton.cdiv(width // head_dim, _HEADS))](
            qkv, cos, sin, slot_mapping, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            query, key_cache, value_cache, eps, offset,
            QUERY_HEADS=query_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=cos.shape[-1],
            NORM=q_norm is not None, OFFSET=offset != 0, HEADS=_HEADS, BLOCK_D=triton.next_power_of_2(head_dim),
            DEPENDENT=dependent, launch_pdl=dependent,
        )  # fmt: skip
    return query

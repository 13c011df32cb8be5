"""From a layer's fused projection to attention's inputs: head norms, rotation, and the write into the paged cache."""

import torch

from kernels.kv_cache import write_kv
from kernels.norm import rms_norm
from kernels.rotary import rotate


def rotary_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """Rotates queries and keys, and stores keys and values at their tokens' slots.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys, values.
        cos, sin: [tokens, r] float32, see ``rotate``.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], changed in place; the dtype of ``qkv`` or
            float8_e4m3fn.
        slot_mapping: [tokens] int64, see ``write_kv``; on a GPU a token with a negative slot is not stored.
        q_norm, k_norm: [head_dim]: weights of the norm of each head before its rotation; None where heads have none.
        eps, offset: of those norms, see ``rms_norm``.

    Returns:
        The queries, [tokens, heads, head_dim].
    """
    if qkv.is_cuda:
        from kernels.gpu.rotary_kv import rotary_kv as fast

        return fast(qkv, cos, sin, key_cache, value_cache, slot_mapping, q_norm, k_norm, eps, offset)
    kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, eps, offset), rms_norm(key, k_norm, eps, offset)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    write_kv(key, value, key_cache, value_cache, slot_mapping)
    return query

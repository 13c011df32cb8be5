"""From a layer's fused projection to attention's inputs: head norms, rotation, and the write into the paged cache."""

from dataclasses import dataclass

import torch

from kernels.kv_cache import write_kv
from kernels.norm import rms_norm
from kernels.rotary import rotate


@dataclass(frozen=True)
class HeadNorms:
    """Norms of each query and key head before its rotation.

    Attributes:
        query, key: weights, [head_dim].
        eps, offset: see ``kernels.norm.rms_norm``.
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    offset: float = 0.0


def rotary_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Rotates queries and keys, and stores keys and values at their tokens' slots.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys, values.
        cos, sin: [tokens, r] float32, see ``rotate``.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], changed in place; the dtype of ``qkv`` or
            float8_e4m3fn.
        slot_mapping: [tokens] int64, see ``write_kv``; on a GPU a token with a negative slot is not stored.
        norms: None where heads have none.

    Returns:
        The queries, [tokens, heads, head_dim].
    """
    if qkv.is_cuda:
        from kernels.gpu.rotary_kv import rotary_kv as fast

        return fast(qkv, cos, sin, key_cache, value_cache, slot_mapping, norms)
    kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        query, key = (
            rms_norm(heads, weight, norms.eps, norms.offset)
            for heads, weight in ((query, norms.query), (key, norms.key))
        )
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    write_kv(key, value, key_cache, value_cache, slot_mapping)
    return query

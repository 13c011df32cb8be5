"""A layer's attention, from the fused projection on: head norms, rotation, the write into the cache, attention."""

import torch

from kernels.attention import AttentionBatch, paged_attention
from kernels.gpu.attention_layout import GpuLayout
from kernels.rotary_kv import HeadNorms, rotary_kv


def rotary_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Rotates queries and keys, stores keys and values at their tokens' slots, and attends to all cached ones.

    On a GPU, a sequence with a single token in this step must not see a token that another such sequence computes in
    it: those are stored and read by one kernel.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys, values.
        cos, sin: [tokens, r] float32, see ``kernels.rotary.rotate``.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], changed in place; the dtype of ``qkv`` or
            float8_e4m3fn.
        batch: the step's layout, of the kind that the device reads.
        scale, window, softcap: see ``paged_attention``.
        norms: None where heads have none.

    Returns:
        [tokens, heads, head_dim], the dtype of ``qkv``.
    """
    if not isinstance(batch, GpuLayout):
        query = rotary_kv(qkv, cos, sin, key_cache, value_cache, batch.slot_mapping, norms)
        return paged_attention(query, key_cache, value_cache, batch, scale, window, softcap)
    from kernels.gpu.decode_attention import decode_attention
    from kernels.gpu.prefill_attention import prefill_attention
    from kernels.gpu.shared_prefix_attention import shared_prefix_attention

    count, start, prefills = batch.num_decodes, batch.prefill_start, batch.prefill_tiles.shape[1] > 0
    kv_heads, head_dim = key_cache.shape[2:]
    out = qkv.new_empty((len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads, head_dim))
    if prefills:
        slots = batch.slot_mapping[start:]
        query = rotary_kv(qkv[start:], cos[start:], sin[start:], key_cache, value_cache, slots, norms)
    if count:
        given = qkv, cos, sin, key_cache, value_cache, batch, scale
        shared = None
        if batch.prefixes is not None and window is None:
            shared = shared_prefix_attention(*given, softcap, norms)
        decode_attention(*given, window, softcap, norms, shared, out)
    if prefills:
        prefill_attention(query, key_cache, value_cache, batch, scale, window, softcap, out[start:])
    return out

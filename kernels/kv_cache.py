"""Writes keys and values into the paged cache, and reads them.

The cache has the dtype of the keys, or is float8_e4m3fn: values are then rounded to it without a scale, and magnitudes
above 448 cut.
"""

import torch

from kernels.float8 import saturate, widen


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Stores each token's key and value at its slot.

    Args:
        key, value: [tokens, kv_heads, head_dim].
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], changed in place.
        slot_mapping: [tokens], int64: block * block_size + offset in the block. Slots are distinct.
    """
    for new, cache in ((key, key_cache), (value, value_cache)):
        if cache.dtype == torch.float8_e4m3fn:
            # As bytes: torch copies no float8 by index.
            cache.flatten(0, 1).view(torch.uint8).index_copy_(0, slot_mapping, saturate(new).view(torch.uint8))
        else:
            cache.flatten(0, 1).index_copy_(0, slot_mapping, new)


def read_blocks(cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of the blocks [n] int64 of a cache of keys or values, [n, block_size, kv_heads, head_dim] in ``dtype``."""
    if cache.dtype == torch.float8_e4m3fn:
        return widen(cache.view(torch.uint8).index_select(0, blocks).view(cache.dtype), dtype)
    return cache.index_select(0, blocks)

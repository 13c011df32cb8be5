"""Writes keys and values into the paged cache."""

import torch


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
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)

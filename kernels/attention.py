"""Attention over a paged key-value cache (PagedAttention: Kwon et al., 2023), prefill and decode in one call.

The torch reference gathers each sequence's blocks and leaves the arithmetic to ``scaled_dot_product_attention``.
Query heads that share a key-value head are folded into the query dimension, so that keys are never repeated.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class DecodeGroup:
    """Decoding sequences of similar length, padded to the longest: one gather and one attention call."""

    rows: torch.Tensor  # [n] int64: their places in the step
    blocks: torch.Tensor  # [n * padded_blocks] int64: block ids, padding reads block 0 and is masked
    mask: torch.Tensor  # [n, 1, 1, padded_blocks * block_size] bool: True where a key is visible


@dataclass(frozen=True)
class PrefillChunk:
    """A sequence with several query tokens in this step."""

    start: int  # first token's place in the step
    end: int
    blocks: torch.Tensor  # [blocks of the context] int64
    context_len: int
    mask: torch.Tensor | None  # [end - start, context_len] bool; None when plain causal (no earlier context)


@dataclass(frozen=True)
class AttentionBatch:
    """What all attention layers of one step share. Sequences with one query token come first.

    Attributes:
        slot_mapping: [tokens] int64, where each token's key and value go (see ``write_kv``).
        block_tables: [sequences, most blocks] int64, padded with 0.
        query_lens: query tokens of each sequence in this step.
        context_lens: tokens of each sequence up to and with this step's.
        block_size: tokens a block.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_size: int

    @cached_property
    def num_decodes(self) -> int:
        """Sequences with a single query token; they are the first tokens of the step."""
        return sum(length == 1 for length in self.query_lens)

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """Single-token sequences, grouped so that padding at most doubles the keys read."""
        members: dict[int, list[int]] = {}
        for row in range(self.num_decodes):
            members.setdefault(self._num_blocks(row).bit_length(), []).append(row)
        groups = []
        device = self.block_tables.device
        for rows in members.values():
            padded = max(self._num_blocks(row) for row in rows)
            index = torch.tensor(rows, device=device)
            lengths = torch.tensor([self.context_lens[row] for row in rows], device=device)
            visible = torch.arange(padded * self.block_size, device=device) < lengths[:, None]
            blocks = self.block_tables.index_select(0, index)[:, :padded].flatten()
            groups.append(DecodeGroup(index, blocks, visible[:, None, None, :]))
        return groups

    @cached_property
    def prefill_chunks(self) -> list[PrefillChunk]:
        """Sequences with several query tokens."""
        chunks = []
        start = self.num_decodes
        device = self.block_tables.device
        for row in range(self.num_decodes, len(self.query_lens)):
            end = start + self.query_lens[row]
            context = self.context_lens[row]
            mask = None
            if context > self.query_lens[row]:
                positions = torch.arange(context - self.query_lens[row], context, device=device)
                mask = torch.arange(context, device=device) <= positions[:, None]
            blocks = self.block_tables[row, : self._num_blocks(row)]
            chunks.append(PrefillChunk(start, end, blocks, context, mask))
            start = end
        return chunks

    def _num_blocks(self, row: int) -> int:
        return -(-self.context_lens[row] // self.block_size)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """Causal attention of each query token to its sequence's cached keys, its own included.

    Args:
        query: [tokens, heads, head_dim]; heads is a multiple of kv_heads.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim]; this step's keys are already written.
        batch: the step's layout.
        scale: multiplies the scores, usually 1 / sqrt(head_dim).

    Returns:
        [tokens, heads, head_dim], the dtype of ``query``.
    """
    heads, kv_heads, head_dim = query.shape[1], key_cache.shape[2], query.shape[2]
    out = torch.empty_like(query)
    for group in batch.decode_groups:
        count = group.rows.numel()
        keys = key_cache.index_select(0, group.blocks).view(count, -1, kv_heads, head_dim).transpose(1, 2)
        values = value_cache.index_select(0, group.blocks).view(count, -1, kv_heads, head_dim).transpose(1, 2)
        folded = query.index_select(0, group.rows).view(count, kv_heads, heads // kv_heads, head_dim)
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask, scale=scale)
        out.index_copy_(0, group.rows, attended.reshape(count, heads, head_dim))
    for chunk in batch.prefill_chunks:
        keys = key_cache.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.context_len].transpose(0, 1)
        values = value_cache.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.context_len].transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            query[chunk.start : chunk.end].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scale,
            enable_gqa=heads != kv_heads,
        )
        out[chunk.start : chunk.end] = attended[0].transpose(0, 1)
    return out

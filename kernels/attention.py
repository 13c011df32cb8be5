"""Attention over a paged key-value cache (PagedAttention: Kwon et al., 2023), prefill and decode in one call.

This torch reference gathers each sequence's blocks and leaves the arithmetic to ``scaled_dot_product_attention``.
Query heads that share a key-value head are folded into the query dimension, so that keys are never repeated.

In half precision on a CPU, a query's result is the same bit for bit however its sequence is batched, chunked or cached:
torch's kernel sums keys in tiles of 512 and in an order that depends on the size of the last tile and on the number of
queries, so keys are padded to whole tiles and queries to small multiples. Rounding to half precision would turn each
difference of the last bit into a visible one.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F

from kernels.gpu.attention_layout import GpuLayout
from kernels.kv_cache import read_blocks

Masks = dict[int | None, torch.Tensor]  # by window

_KEY_TILE = 512
_DECODE_QUERY_TILE = 4
_PREFILL_QUERY_TILE = 8


def key_tile(dtype: torch.dtype, device: torch.device, block_size: int) -> int:
    """To what multiple of tokens a sequence's keys are padded."""
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        return max(_KEY_TILE, block_size)
    return block_size


@dataclass(frozen=True)
class DecodeGroup:
    """Decoding sequences of similar length, padded to the longest: one gather and one attention call."""

    rows: torch.Tensor  # [n] int64: their places in the step
    blocks: torch.Tensor  # [n * padded_blocks] int64: block ids, padding reads block 0 and is masked
    context_lens: torch.Tensor  # [n] int64
    masks: Masks = field(default_factory=dict)

    def mask(self, num_keys: int, window: int | None) -> torch.Tensor:
        """[n, 1, 1, num_keys] bool: True where a key is visible. Built once for all layers with this window."""
        if window in self.masks:
            return self.masks[window]
        keys = torch.arange(num_keys, device=self.rows.device)
        visible = keys < self.context_lens[:, None]
        if window is not None:
            visible &= keys >= self.context_lens[:, None] - window
        self.masks[window] = visible[:, None, None, :]
        return self.masks[window]


@dataclass(frozen=True)
class PrefillChunk:
    """A sequence with several query tokens in this step."""

    start: int  # first token's place in the step
    end: int
    blocks: torch.Tensor  # [blocks of the context] int64
    context_len: int
    padded_queries: int
    padded_keys: int
    masks: Masks = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """[padded queries, padded keys] bool: True where a key is visible; None when plain causal. Built once."""
        count = self.end - self.start
        if count == self.padded_keys and (window is None or window >= count):
            return None
        if window in self.masks:
            return self.masks[window]
        keys = torch.arange(self.padded_keys, device=self.blocks.device)
        first = self.context_len - count
        queries = torch.arange(first, first + self.padded_queries, device=self.blocks.device)[:, None]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        self.masks[window] = visible
        return visible


@dataclass(frozen=True)
class HostLayout:
    """What all attention layers of one step share, as the torch reference reads it. Sequences with one query token come
    first.

    Attributes:
        slot_mapping: [tokens] int64, where each token's key and value go (see ``write_kv``).
        block_tables: [sequences, most blocks] int64, padded with 0.
        query_lens: query tokens of each sequence in this step.
        context_lens: tokens of each sequence up to and with this step's.
        block_size: tokens a block.
        key_tile: see the function of this name; ``block_size`` pads to whole blocks only.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_size: int
    key_tile: int

    @property
    def query_tiles(self) -> tuple[int, int]:
        """To what multiples the queries of one decode and one prefill call are padded."""
        return (_DECODE_QUERY_TILE, _PREFILL_QUERY_TILE) if self.key_tile > self.block_size else (1, 1)

    @cached_property
    def num_decodes(self) -> int:
        """Sequences with a single query token; they are the first tokens of the step."""
        return sum(length == 1 for length in self.query_lens)

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """Single-token sequences, grouped so that padding at most doubles the keys read."""
        members: dict[int, list[int]] = {}
        for row in range(self.num_decodes):
            members.setdefault((self._padded_keys(row) // self.key_tile).bit_length(), []).append(row)
        groups = []
        device = self.block_tables.device
        for rows in members.values():
            padded = max(self._padded_keys(row) for row in rows) // self.block_size
            index = torch.tensor(rows, device=device)
            lengths = torch.tensor([self.context_lens[row] for row in rows], device=device)
            blocks = _widen(self.block_tables.index_select(0, index), padded).flatten()
            groups.append(DecodeGroup(index, blocks, lengths))
        return groups

    @cached_property
    def prefill_chunks(self) -> list[PrefillChunk]:
        """Sequences with several query tokens."""
        chunks = []
        start = self.num_decodes
        for row in range(self.num_decodes, len(self.query_lens)):
            end = start + self.query_lens[row]
            keys = self._padded_keys(row)
            blocks = _widen(self.block_tables[row], keys // self.block_size)
            queries = _round_up(self.query_lens[row], self.query_tiles[1])
            if self.key_tile == self.block_size:
                keys = self.context_lens[row]
            chunks.append(PrefillChunk(start, end, blocks, self.context_lens[row], queries, keys))
            start = end
        return chunks

    def _padded_keys(self, row: int) -> int:
        return _round_up(self.context_lens[row], self.key_tile)


AttentionBatch = HostLayout | GpuLayout


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _widen(tables: torch.Tensor, width: int) -> torch.Tensor:
    """Block tables cut or padded with block 0 to ``width``, [..., width]."""
    return F.pad(tables, (0, width - tables.shape[-1])) if width > tables.shape[-1] else tables[..., :width]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: HostLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of each query token to its sequence's cached keys, its own included.

    Args:
        query: [tokens, heads, head_dim]; heads is a multiple of kv_heads.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], the dtype of ``query`` or float8_e4m3fn;
            this step's keys are already written.
        batch: the step's layout.
        scale: multiplies the scores, usually 1 / sqrt(head_dim).
        window: a query sees this many tokens, itself included; None is all.
        softcap: scores become ``softcap * tanh(score / softcap)``; None is off.

    Returns:
        [tokens, heads, head_dim], the dtype of ``query``.
    """
    out = torch.empty_like(query)
    heads, kv_heads, head_dim = query.shape[1], key_cache.shape[2], query.shape[2]
    for group in batch.decode_groups:
        count = group.rows.numel()
        keys, values = (
            read_blocks(cache, group.blocks, query.dtype).view(count, -1, kv_heads, head_dim).transpose(1, 2)
            for cache in (key_cache, value_cache)
        )
        folded = query.index_select(0, group.rows).view(count, kv_heads, heads // kv_heads, head_dim)
        folded = _pad_queries(folded, batch.query_tiles[0])
        mask = group.mask(keys.shape[2], window)
        attended = _attend(folded, keys, values, mask, scale, softcap)[:, :, : heads // kv_heads]
        out.index_copy_(0, group.rows, attended.reshape(count, heads, head_dim))
    for chunk in batch.prefill_chunks:
        keys, values = (
            read_blocks(cache, chunk.blocks, query.dtype).flatten(0, 1)[: chunk.padded_keys].transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        queries = _pad_queries(query[chunk.start : chunk.end].transpose(0, 1), batch.query_tiles[1])
        attended = _attend(queries[None], keys[None], values[None], chunk.mask(window), scale, softcap)
        out[chunk.start : chunk.end] = attended[0].transpose(0, 1)[: chunk.end - chunk.start]
    return out


def _pad_queries(query: torch.Tensor, tile: int) -> torch.Tensor:
    """[..., queries, dim] with the queries padded to a multiple of ``tile``."""
    return F.pad(query, (0, 0, 0, -query.shape[-2] % tile))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[n, heads, queries, dim] over [n, kv_heads, keys, dim]. Without a mask: plain causal, as many queries as keys."""
    groups = query.shape[1] // keys.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
        )
    if mask is None:
        mask = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.tanh(query @ keys.transpose(-1, -2) * (scale / softcap)) * softcap
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32)
    return weights.to(query.dtype) @ values

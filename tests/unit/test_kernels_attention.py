"""Paged attention against dense attention in float64, over random layouts of blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import HostLayout, paged_attention
from kernels.kv_cache import write_kv

BLOCK = 4
HEAD_DIM = 8


def dense(query, keys, values, scale, window=None, softcap=None):
    """Causal attention of the last queries of one sequence, [tokens, heads, dim], in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(len(keys) - len(query), len(keys))[:, None]
    hidden = torch.arange(len(keys)) > at
    if window is not None:
        hidden |= torch.arange(len(keys)) <= at - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def run(lengths, kv_heads, group, dtype, seed, window=None, softcap=None, tile=BLOCK):
    """lengths: (query tokens, context tokens) of each sequence. Returns (ours, dense), [tokens, heads, dim]."""
    torch.manual_seed(seed)
    lengths = sorted(lengths, key=lambda pair: pair[0] > 1)
    blocks_of = [-(-context // BLOCK) for _, context in lengths]
    order = torch.randperm(sum(blocks_of)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in blocks_of]
    shape = (sum(blocks_of), BLOCK, kv_heads, HEAD_DIM)
    key_cache = torch.full(shape, 1e4, dtype=dtype)  # what no slot mapping wrote must not be seen
    value_cache = torch.full(shape, 1e4, dtype=dtype)
    queries, expected, slots, new_keys, new_values = [], [], [], [], []
    scale = 0.3
    for (count, context), table in zip(lengths, tables, strict=True):
        query = torch.randn(count, kv_heads * group, HEAD_DIM, dtype=dtype)
        keys, values = torch.randn(2, context, kv_heads, HEAD_DIM, dtype=dtype)
        mapping = torch.tensor([table[i // BLOCK] * BLOCK + i % BLOCK for i in range(context)])
        earlier = context - count
        write_kv(keys[:earlier], values[:earlier], key_cache, value_cache, mapping[:earlier])
        slots.append(mapping[earlier:])
        new_keys.append(keys[earlier:])
        new_values.append(values[earlier:])
        queries.append(query)
        expected.append(dense(query, keys, values, scale, window, softcap))
    width = max(blocks_of)
    batch = HostLayout(
        slot_mapping=torch.cat(slots),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        query_lens=tuple(count for count, _ in lengths),
        context_lens=tuple(context for _, context in lengths),
        block_size=BLOCK,
        key_tile=tile,
    )
    write_kv(torch.cat(new_keys), torch.cat(new_values), key_cache, value_cache, batch.slot_mapping)
    ours = paged_attention(torch.cat(queries), key_cache, value_cache, batch, scale, window, softcap)
    return ours, torch.cat(expected)


sequences = st.tuples(st.integers(1, 9), st.integers(0, 40)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(sequences, min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    seed=st.integers(0, 1000),
    window=st.sampled_from([None, 1, 3, 8, 100]),
    softcap=st.sampled_from([None, None, 2.0]),
    tile=st.sampled_from([BLOCK, 16, 64]),
)
def test_matches_dense_attention(lengths, kv_heads, group, seed, window, softcap, tile):
    ours, expected = run(lengths, kv_heads, group, torch.float32, seed, window, softcap, tile)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype):
    ours, expected = run([(1, 30), (1, 3), (7, 7), (5, 21)], 2, 3, dtype, 0)
    torch.testing.assert_close(ours.double(), expected, rtol=2e-2, atol=2e-2)

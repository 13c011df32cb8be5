"""Paged attention against dense attention in float64, over random layouts of blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import HostLayout, paged_attention
from kernels.kv_cache import read_blocks, write_kv

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


FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_float8_cache_gives_the_same_for_what_it_can_hold(dtype, softcap):
    """Keys and values that float8 holds exactly: not one bit of the result differs."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 40, 2, HEAD_DIM).to(FLOAT8).to(dtype)
    query = torch.randn(1 + 7, 4, HEAD_DIM, dtype=dtype)
    tables = torch.randperm(10).view(2, 5)
    slots = (tables[..., None] * BLOCK + torch.arange(BLOCK)).flatten()
    batch = HostLayout(slots, tables, (1, 7), (17, 20), BLOCK, BLOCK)
    results = []
    for cache_dtype in (dtype, FLOAT8):
        key_cache, value_cache = torch.zeros(2, 10, BLOCK, 2, HEAD_DIM, dtype=cache_dtype)
        write_kv(keys, values, key_cache, value_cache, slots)
        results.append(paged_attention(query, key_cache, value_cache, batch, 0.3, None, softcap))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_float8_cache_rounds_to_the_nearest_and_cuts_what_is_too_large(dtype):
    key = torch.tensor([1.0, 1.05, 1.08, -17.2, 449.0, -60000.0, 2**-9, 2**-11], dtype=dtype).view(1, 1, 8)
    caches = torch.zeros(2, 3, BLOCK, 1, 8, dtype=FLOAT8)
    write_kv(key, 2 * key, *caches, torch.tensor([6]))
    wanted = [1.0, 1.0, 1.125, -18.0, 448.0, -448.0, 2**-9, 0.0]
    assert read_blocks(caches[0], torch.tensor([1]), dtype)[0, 2, 0].tolist() == wanted
    assert read_blocks(caches[1], torch.tensor([1, 0]), dtype)[0, 2, 0].tolist()[:2] == [2.0, 2.0]
    assert caches.float().count_nonzero() == 7 + 7

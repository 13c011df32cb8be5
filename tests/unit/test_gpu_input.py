"""What a GPU is sent of a plan, against what the reference is given: in Triton's interpreter when there is no GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton")
# ruff: noqa: E402

from kernels.gpu.attention_layout import DECODE_TILE, PREFILL_TILE
from worker.block_pool import BlockPool
from worker.decode_graphs import graph_sizes, prefix_graph_sizes
from worker.gpu_columns import decode_size, parts_of_tiles, send
from worker.gpu_input import GpuInputBuilder
from worker.mixed_graphs import mixed_graph_sizes
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams, Sequence, token_array
from worker.speculation.speculator import Speculator
from worker.step_input import HostInputBuilder, StepInput
from worker.step_plan import Sampled, StepPlan

BLOCK_SIZE, ROWS, MAX_BLOCKS = 4, 4, 8


def same(found: StepInput, wanted: StepInput, count: int) -> None:
    """The columns of the first ``count`` tokens and of all sequences agree; places after them are not in use."""
    assert found.token_ids[:count].tolist() == wanted.token_ids.tolist()
    assert found.positions[:count].tolist() == wanted.positions.tolist()
    assert found.attention.slot_mapping[:count].tolist() == wanted.attention.slot_mapping.tolist()
    assert (found.attention.slot_mapping[count:] == -1).all()
    contexts = list(wanted.attention.context_lens)
    assert found.attention.context_lens[: len(contexts)].tolist() == contexts
    assert (found.attention.context_lens[len(contexts) :] == 0).all()
    for place, context in enumerate(contexts):
        used = -(-context // BLOCK_SIZE)
        held = found.attention.block_tables[int(found.attention.rows[place])]
        assert held[:used].tolist() == wanted.attention.block_tables[place, :used].tolist()


def check_layout(step: StepInput, plan: StepPlan) -> None:
    layout = step.attention
    assert layout.query_starts.tolist() == [0, *np.cumsum(plan.counts).tolist()]
    assert layout.num_decodes == plan.counts.count(1)
    tiles = [-(-(start + 1) // DECODE_TILE) for start in plan.starts[: layout.num_decodes]]
    assert layout.decode_tiles.tolist() == [0, *np.cumsum(tiles).tolist()]
    prefills = range(layout.num_decodes, len(plan.counts))
    want = [(place, begin) for place in prefills for begin in range(0, plan.counts[place], PREFILL_TILE)]
    assert [(place, begin) for place, begin, part, _ in layout.prefill_tiles.T.tolist() if part == 0] == want
    for _, _, part, count in layout.prefill_tiles.T.tolist():
        assert 0 <= part < count


def check_captured(captured: StepInput, step: StepInput) -> None:
    """What has room for more says the same as what was made for the step."""
    found, wanted = captured.attention, step.attention
    for name in ("query_starts", "decode_tiles"):
        told, known = getattr(found, name).tolist(), getattr(wanted, name).tolist()
        assert told == known + known[-1:] * (len(told) - len(known))
    used = wanted.prefill_tiles.shape[1]
    assert torch.equal(found.prefill_tiles[:, :used], wanted.prefill_tiles)
    assert (found.prefill_tiles[:, used:] == -1).all()


class HalfRight:
    """Drafts for steps that sample nothing but 1: the first two are right."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [[1, 1, 0][:most] for _, most in wanted]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=7), st.booleans(), st.booleans())
def test_a_gpu_is_told_what_the_reference_is(requests: list[tuple[int, int]], cached: bool, drafted: bool) -> None:
    """Prompts in chunks, drafts, preemption and rows that change hands; sampled ids stay on the device."""
    speculator = Speculator(HalfRight(), 3) if drafted else None
    scheduler = Scheduler(BlockPool(10, cached), BLOCK_SIZE, ROWS, max_num_batched_tokens=11, speculator=speculator)
    gpu = GpuInputBuilder(ROWS, MAX_BLOCKS, BLOCK_SIZE, DEVICE, prefill_parts=3)
    host = HostInputBuilder(ROWS, BLOCK_SIZE, BLOCK_SIZE, torch.device("cpu"))
    packed = torch.empty(decode_size(ROWS + 2), dtype=torch.int32, device=DEVICE)
    todo, sampled = list(requests), 100
    while todo or scheduler.has_unfinished:
        if todo:
            prompt, max_tokens = todo.pop()
            tokens = token_array()
            tokens.extend(range(prompt))
            scheduler.add(Sequence("test", tokens, SamplingParams(), max_tokens))
        plan = scheduler.plan()
        if plan is None:
            continue
        # As if the host did not know the ids yet: those that were sampled last are read on the device.
        for place, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True)):
            if count == 1 and plan.starts[place] > 0 and row not in plan.started_rows and place % 2:
                plan.device_tokens.append(place)
                plan.token_ids[place] = 0
        wanted = host.build(plan)
        if max(plan.counts) == 1:
            send(gpu.decode_columns(plan, ROWS + 2), packed)
            found = gpu.decode_input(packed, ROWS + 2)
            assert found.sample_rows[: len(plan.rows)].tolist() == plan.rows
        else:
            found = gpu.build(plan)
            check_layout(found, plan)
            assert found.sample_tokens.tolist() == wanted.sample_tokens.tolist()
            assert found.sample_rows.tolist() == wanted.sample_rows.tolist()
            size = gpu.mixed_size(len(plan.token_ids) + 2)
            columns, sample_tokens, sample_rows = gpu.mixed_columns(plan, size)
            captured = gpu.mixed_input(torch.from_numpy(columns).to(DEVICE), size)
            same(captured, wanted, len(plan.token_ids))
            check_captured(captured, found)
            assert sample_tokens.tolist() == wanted.sample_tokens.tolist()
            assert sample_rows.tolist() == wanted.sample_rows.tolist()
        same(found, wanted, len(plan.token_ids))
        ids = [1] * len(plan.samples) if drafted else list(range(sampled, sampled + len(plan.samples)))
        sampled += len(ids)
        for builder in (host, gpu):
            for index, token_id in zip(plan.samples, ids, strict=True):
                builder.last_tokens[plan.rows[index]] = token_id
        scheduler.settle(plan, Sampled(ids))


@given(st.integers(1, 3000))
def test_graph_sizes_hold_every_batch_that_graphs_are_for(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_num_seqs, 512)
    shared = prefix_graph_sizes(max_num_seqs)
    assert shared == sorted(set(shared))
    assert shared[-1:] == sizes[-1:] if max_num_seqs >= 16 else not shared


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=20), st.integers(1, 16))
def test_keys_are_divided_among_as_many_parts_as_fill_a_gpu(keys: list[int], wanted: int) -> None:
    parts = parts_of_tiles(keys, wanted)
    assert min(parts) >= 1
    assert sum(parts) <= max(len(keys), 2 * wanted)
    if len(keys) >= wanted:
        assert max(parts) == 1
    for before, count in zip(keys, parts, strict=True):
        assert count == 1 or before / count >= 256


@given(st.integers(1, 5000), st.integers(1, 600))
def test_a_captured_step_has_room_for_all_that_fits(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    sizes = mixed_graph_sizes(max_num_batched_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_num_batched_tokens, 2048)
    inputs = GpuInputBuilder(max_num_seqs, 1, BLOCK_SIZE, DEVICE, prefill_parts=4)
    for size in map(inputs.mixed_size, sizes):
        assert size.sequences == min(size.tokens, max_num_seqs)
        assert size.tiles >= size.divided
        starts, lengths = zip(*size.places, strict=True)
        assert all(start % 4 == 0 for start in starts)
        assert all(start + length <= after for start, length, after in zip(starts, lengths, starts[1:], strict=False))

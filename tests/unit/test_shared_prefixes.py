"""Decoding sequences that share a prefix: how they are grouped, and that attention to it is the same, read once for all
or by each. On a GPU when there is one, else in Triton's interpreter."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kernels.gpu.attention_layout import DECODE_TILE, PREFIX_MEMBERS
from tests.doubles.paged_case import DTYPES, PagedCase
from worker.sequence import token_array
from worker.shared_prefixes import MIN_MEMBERS, PrefixGroup, PrefixGrouping
from worker.step_plan import StepPlan

BLOCK_SIZE = 16


def members_of(*sizes: int) -> list[list[int]]:
    """Places of groups that stand in the step one after another, each from the place after the first of the last."""
    ends = np.cumsum((0, *sizes)).tolist()
    return [list(range(*pair)) for pair in pairwise(ends)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 17, 40])
def test_a_group_of_any_size(dtype: torch.dtype, size: int) -> None:
    """Among others that have nothing to do with it, and places that are not in use."""
    lengths = [(1, 200 + 7 * place) for place in range(size)] + [(1, 70), (1, 1), (1, 300), (1, 128)]
    PagedCase(lengths, 4, 2, 16, dtype, 4, groups=[PrefixGroup(list(range(size)), 192)]).check()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("wanted_parts", [1, 3, 40])
def test_several_groups_and_single_sequences(softcap: float | None, wanted_parts: int) -> None:
    """Members stand anywhere in the step; prompts are computed beside them."""
    lengths = [(1, 330 + place) for place in range(12)] + [(1, 1000), (5, 40), (60, 200)]
    groups = [PrefixGroup([0, 2, 4, 6], 320), PrefixGroup([1, 3, 5, 9, 10, 12], 256)]
    case = PagedCase(lengths, 8, 2, 16, torch.float16, 2, groups=groups, wanted_parts=wanted_parts)
    case.check(softcap=softcap)


@pytest.mark.parametrize("own", [1, 2, DECODE_TILE, DECODE_TILE + 1, 200])
@pytest.mark.parametrize("keys", [DECODE_TILE, 5 * DECODE_TILE])
def test_what_is_shared_ends_at_a_tile(keys: int, own: int) -> None:
    """One member has as little as the newest token beyond it, others more."""
    lengths = [(1, keys + own), (1, keys + 1), (1, keys + 150), (1, keys + 64)]
    PagedCase(lengths, 4, 1, 32, torch.float32, groups=[PrefixGroup([0, 1, 2, 3], keys)]).check()


def test_layers_with_a_window_read_for_themselves() -> None:
    lengths = [(1, 300 + place) for place in range(6)]
    PagedCase(lengths, 4, 2, 16, torch.float32, groups=[PrefixGroup(list(range(6)), 256)]).check(window=270)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16][:3])
@pytest.mark.parametrize(("head_dim", "softcap"), [(24, None), (64, 5.0)])
def test_a_float8_cache(dtype: torch.dtype, head_dim: int, softcap: float | None) -> None:
    lengths = [(1, 200 + 9 * place) for place in range(5)] + [(1, 90), (2, 30)]
    groups = [PrefixGroup([0, 1, 3, 4], 192)]
    PagedCase(lengths, 4, 2, head_dim, dtype, 1, float8=True, groups=groups).check(softcap=softcap)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 24), (16, 1, 128), (5, 1, 32), (8, 1, 256)]
)
def test_normed_heads_of_many_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    lengths = [(1, 140 + place) for place in range(18)]
    groups = [PrefixGroup(list(range(17)), 128)]
    PagedCase(lengths, heads, kv_heads, head_dim, torch.float16, 6, normed=True, groups=groups).check()


def plan_of(tables: list[list[int]], starts: list[int], started: bool = True) -> StepPlan:
    count = len(tables)
    plan = StepPlan(1, rows=list(range(count)), starts=starts, counts=[1] * count, block_tables=tables)
    plan.token_ids = token_array()
    plan.token_ids.extend([0] * count)
    plan.started_rows = plan.rows if started else []
    return plan


@st.composite
def prefix_trees(draw: st.DrawFn) -> StepPlan:
    """Sequences whose blocks branch off from one another's anywhere."""
    tables: list[list[int]] = []
    fresh = 0
    for _ in range(draw(st.integers(1, 40))):
        table: list[int] = []
        if tables and draw(st.booleans()):
            other = tables[draw(st.integers(0, len(tables) - 1))]
            table = other[: draw(st.integers(0, len(other)))]
        own = draw(st.integers(0 if table else 1, 40))
        tables.append([*table, *range(fresh, fresh + own)])
        fresh += own
    starts = [draw(st.integers(0, len(table) * BLOCK_SIZE - 1)) for table in tables]
    return plan_of(tables, starts)


@settings(max_examples=200, deadline=None)
@given(prefix_trees(), st.integers(1, 2000), st.integers(1, 200))
def test_groups_share_what_they_say(plan: StepPlan, min_tokens_saved: int, wanted_parts: int) -> None:
    grouping = PrefixGrouping(BLOCK_SIZE, wanted_parts, min_tokens_saved)
    groups = grouping.find(plan)
    everyone = [place for group in groups for place in group.members]
    assert len(everyone) == len(set(everyone))
    for group in groups:
        assert len(group.members) >= MIN_MEMBERS
        assert group.tokens_saved >= min_tokens_saved
        assert group.keys % DECODE_TILE == 0
        heads = {tuple(plan.block_tables[place][: group.keys // BLOCK_SIZE]) for place in group.members}
        assert len(heads) == 1
        assert all(group.keys <= plan.starts[place] for place in group.members)  # the newest token is never shared
    check_columns(grouping, groups, len(plan.rows) + 3)


def check_columns(grouping: PrefixGrouping, groups: list[PrefixGroup], places: int) -> None:
    """Every member has its keys read once, in parts that follow one another."""
    columns = grouping.columns(groups, places)
    most_tiles, most_parts = grouping.most(places)
    assert columns.shape == (grouping.size(places),)
    keys, counts, firsts = columns[: 3 * places].reshape(3, places)
    tiles = columns[3 * places :][: most_tiles * PREFIX_MEMBERS].reshape(-1, PREFIX_MEMBERS)
    tile_of, begins, ends = columns[3 * places + tiles.size :].reshape(3, most_parts)
    expected = {place: group.keys for group in groups for place in group.members}
    used = 0
    for place in range(places):
        assert keys[place] == expected.get(place, 0)
        first, slot = divmod(int(firsts[place]), PREFIX_MEMBERS)
        held = range(first, first + counts[place])
        assert bool(held) == (place in expected)
        assert all(tiles[tile_of[part], slot] == place for part in held)
        bounds = [(int(begins[part]), int(ends[part])) for part in held]
        assert [*(begin for begin, _ in bounds), keys[place]] == [0, *(end for _, end in bounds)]
        assert all(begin < end and begin % DECODE_TILE == 0 for begin, end in bounds)
        used = max(used, held.stop if held else 0)
    assert (begins[used:] == ends[used:]).all()


def test_the_groups_that_save_most_are_taken() -> None:
    """All share 64 blocks; two documents of 512 more are worth reading apart, three sequences with a third are not."""
    system = list(range(64))
    tables = []
    for document, readers in ((1000, 8), (2000, 5), (3000, 3)):
        tables += [
            [*system, *range(document, document + 512), 10_000 + len(tables) + place] for place in range(readers)
        ]
    starts = [len(table) * BLOCK_SIZE - 1 for table in tables]
    groups = PrefixGrouping(BLOCK_SIZE, 32, 16_384).find(plan_of(tables, starts))
    assert groups == [PrefixGroup(members, 576 * BLOCK_SIZE) for members in members_of(8, 5)]
    assert (
        PrefixGrouping(BLOCK_SIZE, 32, 16_384).find(plan_of([[*system, 100 + place] for place in range(9)], [1030] * 9))
        == []
    )
    wide = PrefixGrouping(BLOCK_SIZE, 32, 16_384).find(
        plan_of([[*system, 100 + place] for place in range(17)], [1030] * 17)
    )
    assert wide == [PrefixGroup(list(range(17)), 1024)]


def test_groups_are_found_anew_when_a_row_changes_hands() -> None:
    grouping = PrefixGrouping(BLOCK_SIZE, 32, min_tokens_saved=1)
    shared = list(range(8))
    first = grouping.find(plan_of([[*shared, 20 + place] for place in range(4)], [130] * 4))
    assert first == [PrefixGroup([0, 1, 2, 3], 128)]
    # Kept while nothing starts, even if it could be told now that a table is another one.
    again = plan_of([[*shared, 20 + place, 30 + place] for place in range(4)], [146] * 4, started=False)
    assert grouping.find(again) is first
    assert grouping.find(plan_of([*([*shared, 20 + place] for place in range(3)), [90] * 9], [130] * 4)) == []
    assert grouping.find(StepPlan(0)) == []

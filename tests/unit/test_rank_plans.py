"""Plans on their way to the ranks: what arrives is what was planned, whatever happened to the rows before."""

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from worker.block_pool import BlockPool
from worker.config import ConfigError
from worker.model_config import ModelConfig, RopeConfig
from worker.parallel.plan_wire import PlanPacker, PlanUnpacker
from worker.parallel.shards import Parallel, check_degree
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, SamplingParams, Sequence, token_array
from worker.step_plan import Sampled, StepPlan

IDS = st.integers(0, 2**31 - 1)
COLUMNS = (
    "number",
    "rows",
    "starts",
    "counts",
    "block_tables",
    "token_ids",
    "device_tokens",
    "samples",
    "started_rows",
)


def columns(plan: StepPlan) -> dict:
    return {name: getattr(plan, name) for name in COLUMNS}


@st.composite
def plans(draw) -> StepPlan:
    """Any plan of up to five rows; tables change from one plan to the next in any way."""
    rows = draw(st.lists(st.integers(0, 4), unique=True, min_size=1, max_size=5))
    counts = [draw(st.integers(1, 3)) for _ in rows]
    tokens = token_array()
    tokens.extend(draw(st.lists(IDS, min_size=sum(counts), max_size=sum(counts))))
    return StepPlan(
        draw(IDS),
        rows=rows,
        started_rows=rows,
        starts=[draw(IDS) for _ in rows],
        counts=counts,
        block_tables=[draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)) for _ in rows],
        token_ids=tokens,
        device_tokens=draw(st.lists(st.integers(0, len(tokens) - 1), unique=True)),
        samples=draw(st.lists(st.integers(0, len(rows) - 1), unique=True)),
    )


@given(st.lists(plans(), max_size=8))
def test_plans_arrive_as_they_were(sent):
    packer, unpacker = PlanPacker(), PlanUnpacker()
    for plan in sent:
        got = unpacker.unpack(packer.pack(plan))
        assert columns(got.plan) == columns(plan)
        ends = [sum(plan.counts[: index + 1]) - 1 for index in plan.samples]
        assert got.logit_calls == ([ends] if ends else [])


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.booleans()), min_size=1, max_size=8))
def test_a_schedulers_plans_arrive_with_preemption_and_cancellation(requests):
    """A pool so small that sequences push each other out, and rows go from one sequence to another."""
    scheduler = Scheduler(BlockPool(8, True), 4, max_num_seqs=4, max_num_batched_tokens=9)
    packer, unpacker = PlanPacker(), PlanUnpacker()
    todo = list(requests)
    while todo or scheduler.has_unfinished:
        if todo:
            prompt, max_tokens, cancel = todo.pop()
            tokens = token_array()
            tokens.extend(range(prompt))
            seq = Sequence("test", tokens, SamplingParams(), max_tokens)
            scheduler.add(seq)
        plan = scheduler.plan()
        if plan is None:
            continue
        assert columns(unpacker.unpack(packer.pack(plan)).plan) == columns(plan)
        scheduler.settle(plan, Sampled([1] * len(plan.samples)))
        if cancel:
            scheduler.cancel(seq, FinishReason.CANCELLED)


def test_of_a_growing_table_only_what_is_new_is_sent():
    packer = PlanPacker()

    def size(table: list[int], started: bool = False) -> int:
        plan = StepPlan(1, rows=[0], starts=[0], counts=[1], block_tables=[table], samples=[0])
        plan.started_rows = [0] if started else []
        plan.token_ids.append(1)
        return len(packer.pack(plan))

    first, again, longer = size(list(range(1000)), started=True), size(list(range(1000))), size(list(range(1001)))
    assert first - again == 4 * 1001  # the blocks, and which row begins
    assert longer - again == 4


def heads(num_heads: int, num_kv_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=2,
        max_position=8,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e4),
    )


@given(st.integers(0, 1000), st.integers(1, 9))
def test_shares_cover_everything_once(width, size):
    ranks = [Parallel(rank, size) for rank in range(size)]
    assert [i for rank in ranks for i in rank.share(width)] == list(range(width))
    assert max(len(rank.share(width)) for rank in ranks) - min(len(rank.share(width)) for rank in ranks) <= 1
    padded = [i for rank in ranks for i in rank.padded_share(width)]
    assert padded[:width] == list(range(width))
    assert len({len(rank.padded_share(width)) for rank in ranks}) == 1


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 64))
def test_every_rank_has_the_key_value_heads_of_its_queries(kv_heads, queries_each, size):
    config = heads(kv_heads * queries_each, kv_heads)
    try:
        check_degree(config, size)
    except ConfigError:
        reject()
    for rank in range(size):
        parallel = Parallel(rank, size)
        held = parallel.kv_heads(kv_heads)
        assert {query // queries_each for query in parallel.share(config.num_heads)} == set(held)
        assert len(parallel.share(config.num_heads)) % len(held) == 0


@pytest.mark.parametrize(("size", "possible"), [(3, "1, 2, 4, 8"), (16, "1, 2, 4, 8"), (5, "1, 2, 4, 8")])
def test_impossible_degrees_are_refused_with_the_possible_ones(size, possible):
    with pytest.raises(
        ConfigError, match=f"is {size}, .* 8 attention heads and 4 key-value heads .*possible: {possible}$"
    ):
        check_degree(heads(8, 4), size)


def test_neither_dividing_nor_multiple_of_key_value_heads_is_refused():
    with pytest.raises(ConfigError, match="12 attention heads and 4 key-value heads"):
        check_degree(heads(12, 4), 6)
    with pytest.raises(ConfigError, match="possible: 1, 3, 6"):
        check_degree(heads(6, 3), 2)

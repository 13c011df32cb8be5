"""The scheduler under random arrivals, cancels and tiny pools: invariants after every step, and the right output."""

import pytest
from hypothesis import given, settings

from protos.prefix import block_hashes
from tests.doubles.fake_runner import FakeRunner
from tests.doubles.scheduler_load import LoadCheck, loads, make_sequence, oracle
from worker.block_pool import BlockPool
from worker.engine import Engine
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, Sequence, SequenceStatus


def make_engine(
    num_blocks=16, block_size=4, max_num_seqs=4, budget=16, caching=True, depth2=False, threshold=0, with_decodes=0
):
    pool = BlockPool(num_blocks, caching)
    scheduler = Scheduler(pool, block_size, max_num_seqs, budget, threshold, with_decodes)
    return Engine(scheduler, FakeRunner(num_blocks, block_size, max_num_seqs, budget), depth2)


def drain(engine: Engine, limit: int = 10_000) -> dict[Sequence, list[int]]:
    outputs: dict[Sequence, list[int]] = {}
    for _ in range(limit):
        if not engine.has_unfinished:
            return outputs
        output = engine.step()
        engine.scheduler.pool.check()
        for seq, first, ids in output.tokens:
            got = outputs.setdefault(seq, [])
            assert first == len(got), "an output index was skipped or repeated"
            got.extend(ids)
    raise AssertionError("the engine does not come to an end")


@settings(max_examples=200, deadline=None)
@given(loads)
def test_random_loads_give_the_oracle_s_output(load):
    """Any mixture of arrivals, cancels and preemptions; ``test_scheduler_faults`` shows what this would find."""
    LoadCheck(load).run()


@pytest.mark.parametrize("depth2", [False, True])
def test_preemption_recomputes_and_changes_nothing(depth2):
    engine = make_engine(num_blocks=10, block_size=2, max_num_seqs=4, budget=64, depth2=depth2)
    seqs = [make_sequence([i, i + 1, i + 2], 14) for i in range(4)]
    for seq in seqs:
        engine.add(seq)
    outputs = drain(engine)
    assert engine.scheduler.num_preemptions > 0
    for seq in seqs:
        assert outputs[seq] == oracle(list(seq.tokens[:3]), 14)


@pytest.mark.parametrize("depth2", [False, True])
def test_no_step_is_spent_on_a_token_beyond_max_tokens(depth2):
    engine = make_engine(depth2=depth2)
    engine.add(make_sequence([1, 2, 3], 4))
    planned = 0
    launch = engine._runner.launch

    def count(plan):
        nonlocal planned
        planned += len(plan.token_ids)
        return launch(plan)

    engine._runner.launch = count
    (tokens,) = drain(engine).values()
    assert len(tokens) == 4
    assert planned == 3 + 3, "the prompt, and each output token but the last"


def test_cached_prefix_is_not_computed_again():
    engine = make_engine(num_blocks=32, budget=64)
    prompt = [1, 2, 3, 0] * 5
    first, second, other_tenant = (make_sequence(prompt, 2, salt) for salt in (b"", b"", b"x"))
    for seq in (first, second, other_tenant):
        engine.add(seq)
        drain(engine)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 16, "all full blocks but the last token's"
    assert other_tenant.num_cached_tokens == 0
    names = block_hashes(first.packed_tokens(0, 20), 4)
    assert len(engine.scheduler.pool.match(names)) == 5, "the blocks are not known by the contract's names"


def test_sequences_of_one_step_share_their_prefix():
    engine = make_engine(num_blocks=32, budget=64)
    seqs = [make_sequence([1, 2, 3, 4, 5, 6, 7, 8, i], 3) for i in range(3)]
    for seq in seqs:
        engine.add(seq)
    outputs = drain(engine)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 8, 8]
    for seq in seqs:
        assert outputs[seq] == oracle(list(seq.tokens[:9]), 3)


class CommitsDecodesAtOnce(Scheduler):
    def _plan_decodes(self) -> tuple[list[Sequence], list[Sequence]]:
        decodes, prefills = super()._plan_decodes()
        for seq in decodes:
            self._commit(seq)
        return decodes, prefills


@pytest.mark.parametrize("scheduler_class", [Scheduler, CommitsDecodesAtOnce])
def test_no_single_token_of_a_step_sees_another_one(scheduler_class):
    """Of sequences that arrive at any moment and lack one token of what another one has just generated."""

    def run() -> None:
        for arrival in range(14):
            pool = BlockPool(32)
            engine = Engine(scheduler_class(pool, 4, 4, 64), FakeRunner(32, 4, 4, 64), False)
            engine.add(make_sequence([1, 2, 3], 14))
            for _ in range(arrival):
                engine.step()
            text = [1, 2, 3, *oracle([1, 2, 3], 14)]
            late = [make_sequence(text[:length], 2) for length in (5, 9, 13)]
            for seq in late:
                engine.add(seq)
            while engine.has_unfinished:
                engine.step()
            for seq in late:
                prompt, output = seq.tokens[: seq.num_prompt_tokens], seq.tokens[seq.num_prompt_tokens :]
                assert list(output) == oracle(list(prompt), 2)

    if scheduler_class is Scheduler:
        run()
    else:
        with pytest.raises(AssertionError, match="a single token sees another one"):
            run()


def test_decodes_go_first_and_long_prompts_come_in_chunks():
    engine = make_engine(num_blocks=64, max_num_seqs=4, budget=10)
    decoding = make_sequence([1, 2], 50)
    engine.add(decoding)
    engine.step()
    long = make_sequence([3] * 40, 2)
    engine.add(long)
    sizes = []
    for _ in range(5):
        plan = engine.scheduler.plan()
        assert plan is not None
        sizes.append(dict(zip(plan.sequences, plan.counts, strict=True)))
        engine.scheduler.settle(plan, engine._runner.launch(plan).sampled())
    assert all(size[decoding] == 1 for size in sizes)
    assert [size.get(long) for size in sizes] == [9, 9, 9, 9, 4]


def test_threshold_lets_short_prompts_pass_a_long_one():
    engine = make_engine(num_blocks=64, max_num_seqs=4, budget=10, threshold=4)
    long, short = make_sequence([3] * 40, 2), make_sequence([1, 2, 1], 1)
    engine.add(long)
    engine.add(short)
    plan = engine.scheduler.plan()
    assert plan is not None
    assert dict(zip(plan.sequences, plan.counts, strict=True)) == {long: 4, short: 3}


def test_few_prompt_tokens_join_a_step_with_decodes():
    engine = make_engine(num_blocks=64, max_num_seqs=4, budget=20, with_decodes=6)
    alone, also_alone = make_sequence([1, 2], 50), make_sequence([2] * 15, 50)
    engine.add(alone)
    engine.add(also_alone)
    plan = engine.scheduler.plan()
    assert plan is not None
    assert plan.counts == [2, 15], "nobody decodes yet"
    engine.scheduler.settle(plan, engine._runner.launch(plan).sampled())
    long, short = make_sequence([3] * 14, 2), make_sequence([1, 2, 1], 9)
    engine.add(long)
    engine.add(short)
    sizes = []
    for _ in range(3):
        plan = engine.scheduler.plan()
        assert plan is not None
        sizes.append(dict(zip(plan.sequences, plan.counts, strict=True)))
        engine.scheduler.settle(plan, engine._runner.launch(plan).sampled())
    assert all(size[alone] == size[also_alone] == 1 for size in sizes)
    assert [size.get(long, 0) for size in sizes] == [6, 6, 2]
    assert [size.get(short, 0) for size in sizes] == [0, 0, 3]


def test_lower_priorities_run_first_and_equal_ones_in_order():
    engine = make_engine(max_num_seqs=1, num_blocks=32)
    seqs = [make_sequence([9, number], 1, priority=priority) for number, priority in enumerate((1, 0, -1, 0, 1))]
    for seq in seqs:
        engine.add(seq)
    ended = []
    while engine.has_unfinished:
        ended += engine.step().finished
    assert [seqs.index(seq) for seq in ended] == [2, 1, 3, 0, 4]


@pytest.mark.parametrize("depth2", [False, True])
def test_the_newest_of_the_lowest_class_is_preempted(depth2):
    """A sequence of the highest class that came last keeps running; those of the lower one go, newest first."""
    engine = make_engine(num_blocks=11, block_size=2, max_num_seqs=4, budget=64, depth2=depth2)
    low = [make_sequence([i, i + 1, i + 2], 14, priority=5) for i in range(3)]
    high = make_sequence([3, 4, 5], 14)
    for seq in low:
        engine.add(seq)
    engine.step()
    engine.add(high)
    preempted = []
    preempt = engine.scheduler._preempt

    def note(seq):
        preempted.append(seq)
        preempt(seq)

    engine.scheduler._preempt = note
    while engine.has_unfinished:
        engine.step()
    assert preempted[0] is low[2]
    assert high not in preempted
    assert low[0] not in preempted
    for seq in (*low, high):
        assert list(seq.tokens[3:]) == oracle(list(seq.tokens[:3]), 14)


def test_a_prompt_is_computed_whole_when_it_says_so():
    engine = make_engine(num_blocks=32, budget=64)
    prompt = [1, 2, 3, 0] * 4
    first, fresh, second = (make_sequence(prompt, 3, skip_reading_prefix_cache=skip) for skip in (True, True, False))
    outputs = []
    for seq in (first, fresh, second):
        engine.add(seq)
        outputs += drain(engine).values()
    assert [seq.num_cached_tokens for seq in (first, fresh, second)] == [0, 0, 12]
    assert outputs[0] == outputs[1] == outputs[2] == oracle(prompt, 3)


def test_deadline_ends_waiting_and_running_sequences():
    engine = make_engine(max_num_seqs=1)
    running, waiting = make_sequence([1], 30, deadline=float("inf")), make_sequence([2], 30, deadline=float("inf"))
    engine.add(running)
    engine.add(waiting)
    engine.step()
    running.deadline = waiting.deadline = 0.0
    output = engine.step()
    assert set(output.finished) == {running, waiting}
    assert running.finish_reason is waiting.finish_reason is FinishReason.DEADLINE
    assert not engine.has_unfinished
    assert engine.scheduler.pool.num_available == 16


def test_emitted_tokens_shift_indices_and_count_towards_max_tokens():
    """A sequence that goes on elsewhere: its earlier output is part of the prompt."""
    prompt = [1, 2, 3]
    whole = oracle(prompt, 10)
    assert len(whole) > 4
    engine = make_engine()
    engine.add(make_sequence(prompt + whole[:4], 10, num_emitted=4))
    tokens = []
    while engine.has_unfinished:
        for _, first, ids in engine.step().tokens:
            assert first == 4 + len(tokens)
            tokens += ids
    assert whole[:4] + tokens == whole


def test_cancelled_while_its_step_runs_is_reported_once():
    engine = make_engine(depth2=True)
    seq = make_sequence([1, 2, 3], 10)
    engine.add(seq)
    engine.step()
    engine.cancel(seq)
    engine.cancel(seq)
    finished, tokens = [], []
    while engine.has_unfinished:
        output = engine.step()
        finished += output.finished
        tokens += output.tokens
        assert not output.admitted or output.admitted == [seq]
    assert finished == [seq]
    assert tokens == []
    assert seq.status is SequenceStatus.FINISHED

"""Who gets drafts, how many, which are accepted, and when a sequence is left alone."""

import pytest

from tests.doubles.scheduler_load import make_sequence, oracle
from tests.unit.test_scheduler import FakeRunner
from worker.block_pool import BlockPool
from worker.config import ConfigError, parse_args
from worker.engine import Engine
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.speculation.acceptance import AcceptanceRate
from worker.speculation.config import SpeculativeConfig, parse_speculative_config
from worker.speculation.speculator import Speculator
from worker.step_plan import StepPlan

PROMPT = [3, 1, 2]


class Script:
    """Drafts the right tokens, or wrong ones only."""

    def __init__(self, right: bool) -> None:
        self.right = right
        self.asked = 0

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        self.asked += len(wanted)
        return [self._drafts(seq, most) for seq, most in wanted]

    def _drafts(self, seq: Sequence, most: int) -> list[int]:
        known = list(seq.tokens)
        tokens = oracle(known, most)
        return tokens if self.right else [token + 1 for token in tokens]


def engine_with(right: bool, drafts: int = 4, budget: int = 64, rows: int = 4, blocks: int = 64, overlap: bool = False):
    script = Script(right)
    scheduler = Scheduler(BlockPool(blocks), 4, rows, budget, speculator=Speculator(script, drafts))
    return Engine(scheduler, FakeRunner(blocks, 4, rows, budget), overlap), script


def plans_of(engine: Engine) -> list[StepPlan]:
    """All plans of a run to the end."""
    plans: list[StepPlan] = []
    launch = engine._runner.launch
    engine._runner.launch = lambda plan: plans.append(plan) or launch(plan)
    while engine.has_unfinished:
        engine.step()
    return plans


def long_prompt() -> list[int]:
    """Of which the fake model goes on for long."""
    return next([first, 1, 2] for first in range(1000) if len(oracle([first, 1, 2], 120)) == 120)


@pytest.mark.parametrize("overlap", [False, True])
def test_right_drafts_save_steps(overlap):
    engine, _ = engine_with(right=True, overlap=overlap)
    engine.add(seq := make_sequence(long_prompt(), 101))
    plans = plans_of(engine)
    assert list(seq.tokens[3:]) == oracle(long_prompt(), 101)
    assert len(plans) == 1 + 100 / 5, "the prompt, and five tokens in each step after it"
    assert engine.scheduler.speculator.num_draft_tokens == engine.scheduler.speculator.num_accepted_tokens == 80


@pytest.mark.parametrize("overlap", [False, True])
def test_wrong_drafts_end_for_a_while(overlap):
    engine, script = engine_with(right=False, overlap=overlap)
    engine.add(seq := make_sequence(long_prompt(), 101))
    plans = plans_of(engine)
    assert list(seq.tokens[3:]) == oracle(long_prompt(), 101)
    assert len([plan for plan in plans if plan.drafts]) == script.asked == 7, "five steps, and two 64 tokens later"
    assert engine.scheduler.speculator.num_accepted_tokens == 0
    if overlap:
        overlapped = [plan for plan in plans if plan.device_tokens]
        assert len(overlapped) > 80, "steps without drafts overlap"


def test_no_draft_after_the_last_token():
    engine, _ = engine_with(right=True)
    engine.add(make_sequence(long_prompt(), 4))
    plans = plans_of(engine)
    assert [sum(map(len, plan.drafts.values())) for plan in plans] == [0, 2]


def test_drafts_take_what_the_budget_leaves():
    """Three decode and a prompt comes: it is computed as if there were no drafts, which get what is left."""
    engine, _ = engine_with(right=True, drafts=8, budget=16)
    for first in range(3):
        engine.add(make_sequence([first, *long_prompt()], 60))
    engine.step()
    engine.add(make_sequence([9] * 10, 60))
    plans = plans_of(engine)
    assert len(plans[0].token_ids) == 16
    assert [len(drafts) for drafts in plans[0].drafts.values()] == [3], "16 tokens less 3 and 10"
    assert all(len(plan.token_ids) <= 16 for plan in plans)


def test_nobody_is_preempted_for_drafts():
    """Both sequences hold four blocks and there are no more: drafts fill these, and end there."""
    engine, _ = engine_with(right=True, drafts=9, blocks=8)
    for first in range(2):
        engine.add(make_sequence([*long_prompt(), *[first] * 9], 18))
    engine.step()
    plan = engine.scheduler.plan()
    assert plan is not None
    assert [len(drafts) for drafts in plan.drafts.values()] == [3, 3]
    assert engine.scheduler.num_preemptions == 0


def test_the_drafter_is_asked_again_while_there_is_room():
    """Those that come first know nothing; what they leave goes to those behind them."""

    class OnlyTheLast(Script):
        def _drafts(self, seq: Sequence, most: int) -> list[int]:
            return super()._drafts(seq, most) if seq.tokens[0] == 3 else []

    seqs = [make_sequence([first, *PROMPT], 60) for first in range(4)]
    for seq in seqs:
        seq.tokens.append(1)
        seq.num_computed = 4
    drafter = OnlyTheLast(right=True)
    [(seq, drafts)] = Speculator(drafter, 4).propose(seqs, budget=5)
    assert seq is seqs[3]
    assert len(drafts) <= 4
    assert drafter.asked == 4


def test_acceptance_is_an_average_that_pauses_below_a_quarter():
    rate = AcceptanceRate()
    for step in range(4):
        rate.record(0, 4, 10 + step)
        assert rate.resumes_at == 0
    rate.record(0, 4, 14)
    assert rate.resumes_at == 14 + 64
    steady = AcceptanceRate()
    for length in range(100):
        steady.record(2, 4, length)
    assert steady.value == pytest.approx(0.5)
    assert steady.resumes_at == 0


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
            SpeculativeConfig("ngram", 4, 4, 2),
        ),
        ('{"method": "ngram", "num_speculative_tokens": 3}', SpeculativeConfig("ngram", 3, 5, 5)),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}',
            SpeculativeConfig("ngram", 3, 4, 4),
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}',
            SpeculativeConfig("ngram", 3, 2, 2),
        ),
    ],
)
def test_the_flag_is_vllms_json(text, config):
    assert parse_speculative_config(text) == config
    assert parse_args(["--model", "m", "--speculative-config", text]).speculative_config == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ngram", "is not JSON"),
        ("[4]", "is not a JSON object"),
        ("{}", "method is None; supported: ngram, draft_model"),
        ('{"method": "eagle3", "num_speculative_tokens": 4}', "method is 'eagle3'"),
        ('{"method": "ngram"}', "num_speculative_tokens is None; it must be a whole number"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens is True"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', "32 at most"),
        ('{"method": "ngram", "num_speculative_tokens": 4, "tree": 1}', "tree is not known to method ngram"),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 2}',
            "prompt_lookup_min is 3, above prompt_lookup_max 2",
        ),
    ],
)
def test_a_wrong_flag_is_refused_by_name(text, words):
    with pytest.raises(ConfigError, match=f"--speculative-config: .*{words}"):
        parse_args(["--model", "m", "--speculative-config", text])

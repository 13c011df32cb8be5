"""Constrained sequences through the engine with a random model: whatever it samples fits, in any company."""

import asyncio
import json
import re

import jsonschema
import pytest
import torch

from tests.doubles.tiny_model import VOCAB, save_tiny
from tests.doubles.tiny_vocabulary import STOP, VOCABULARY, ids_of, text_of
from worker.config import WorkerConfig
from worker.grammar import Constraint, GrammarCompiler
from worker.sequence import FinishReason, SamplingParams, Sequence, token_array
from worker.startup import build_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 120}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 6},
        "ok": {"type": "boolean"},
    },
    "required": ["color", "sizes", "ok"],
    "additionalProperties": False,
}
OBJECT = Constraint("json_schema", json.dumps(SCHEMA))
WORD = Constraint("regex", r"[a-z]{2,8}(-[0-9]{1,3})?")
CHOICE = Constraint("choices", '["yes", "no", "yesno", "abab"]')
SUM = Constraint("grammar", 'root ::= term ("+" term){0,3}\nterm ::= [0-9] | "(" root ")"')
CONSTRAINTS = {"json_schema": OBJECT, "regex": WORD, "choices": CHOICE, "grammar": SUM}


def fits(constraint: Constraint, text: str) -> bool:
    """By another program than the one that made the masks."""
    match constraint:
        case _ if constraint is OBJECT:
            jsonschema.validate(json.loads(text), SCHEMA)
            return True
        case _ if constraint is WORD:
            return re.fullmatch(WORD.source, text) is not None
        case _ if constraint is CHOICE:
            return text in json.loads(CHOICE.source)
    return re.fullmatch(r"[0-9+()]+", text) is not None and isinstance(eval(re.sub(r"0+(?=\d)", "", text)), int)  # noqa: S307


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(VOCABULARY, VOCAB)
    yield compiler
    compiler.close()


def engine(model, **settings):
    config = {"max_model_len": 250, "block_size": 4, "num_gpu_blocks_override": 600, "max_num_seqs": 32}
    return build_engine(WorkerConfig(model=model, dtype="float32", **{**config, **settings}))[0]


def sequence(compiler, constraint, params, prompt=(70, 71), max_tokens=200, stops=(STOP,), output=()):
    tokens = token_array()
    tokens.extend([*prompt, *output])
    automaton = asyncio.run(compiler.automaton(constraint, output)) if constraint is not None else None
    return Sequence(
        "test", tokens, params, max_tokens, frozenset(stops), num_emitted=len(output), automaton=automaton
    )  # fmt: skip


def run(engine, *sequences):
    """The output ids of each, all of them running together."""
    for seq in sequences:
        engine.add(seq)
    while engine.has_unfinished:
        engine.step()
    return [output_of(seq) for seq in sequences]


def output_of(seq):
    return seq.tokens.tolist()[seq.output_start :]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_whatever_is_sampled_fits(model, compiler, kind, async_scheduling):
    constraint = CONSTRAINTS[kind]
    params = [
        SamplingParams(temperature=2.0, seed=seed, top_k=(0, 5)[seed % 2], min_p=(0.0, 0.02)[seed % 3 == 0])
        for seed in range(24)
    ]
    sequences = [sequence(compiler, constraint, each) for each in params]
    outputs = run(engine(model, async_scheduling=async_scheduling), *sequences)
    complete = [
        output for seq, output in zip(sequences, outputs, strict=True) if seq.finish_reason is FinishReason.STOP
    ]
    assert len(complete) >= 20, "most of them come to an end"
    assert len(set(map(tuple, complete))) >= min(3, len(complete))
    for output in complete:
        assert fits(constraint, text_of(output)), text_of(output)
    assert {seq.finish_reason for seq in sequences} <= {FinishReason.STOP, FinishReason.LENGTH}


def neighbours(compiler):
    """Constrained and other sequences with all kinds of rules, in one order every time."""
    found = []
    for index in range(24):
        constraint = (None, OBJECT, WORD, SUM)[index % 4]
        params = SamplingParams(
            temperature=(0.0, 1.5)[index // 4 % 2], seed=index, repetition_penalty=(1.0, 1.3)[index % 3 == 0],
            logit_bias=((20, 3.0),) if index % 5 == 0 else (), bad_words=((30, 31),) if index % 7 == 0 else (),
        )  # fmt: skip
        found.append(sequence(compiler, constraint, params, prompt=range(10, 12 + index), max_tokens=60))
    return found


@pytest.fixture(scope="module")
def alone(model, compiler):
    """What each of the neighbours gives by itself."""
    single = engine(model, async_scheduling=False)
    return [run(single, seq)[0] for seq in neighbours(compiler)]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("settings", "preempts"),
    [({}, False), ({"num_gpu_blocks_override": 63}, True), ({"max_num_batched_tokens": 33}, False)],
)
def test_company_changes_nothing(model, compiler, alone, async_scheduling, settings, preempts):
    together = engine(model, async_scheduling=async_scheduling, **settings)
    assert run(together, *neighbours(compiler)) == alone
    assert (together.scheduler.num_preemptions > 0) == preempts


def test_ranks_change_nothing(model, compiler, alone):
    several = engine(model, async_scheduling=True, tensor_parallel_size=2, device="cpu")
    outputs = run(several, *neighbours(compiler))
    several.close()
    for output, wanted in zip(outputs, alone, strict=True):
        assert output[:4] == wanted[:4], "sums in another order may differ in the end, but not at once"


def test_an_unconstrained_neighbour_is_in_every_step(model, compiler):
    """With overlap, neighbours decode at their full rate, and so do constrained sequences."""
    both = engine(model, async_scheduling=True)
    free = sequence(compiler, None, SamplingParams(temperature=0), max_tokens=40, stops=())
    bound = sequence(compiler, Constraint("regex", "[a-z]{100}"), SamplingParams(temperature=0), max_tokens=40)
    first = both.num_steps
    run(both, free, bound)
    assert len(output_of(free)) == len(output_of(bound)) == 40
    assert both.num_steps - first <= 41


def test_an_attempt_goes_on_where_another_ended(model, compiler):
    params = SamplingParams(temperature=1.5, seed=11)
    whole = run(engine(model), sequence(compiler, OBJECT, params))[0]
    assert len(whole) > 8
    for cut in (1, 5, len(whole) - 1):
        assert run(engine(model), sequence(compiler, OBJECT, params, output=whole[:cut]))[0] == whole


def test_the_end_comes_only_where_the_output_is_complete(model, compiler):
    eager = SamplingParams(temperature=0, logit_bias=((STOP, 100.0),))
    seq = sequence(compiler, Constraint("regex", "[0-9]{3,9}"), eager)
    (output,) = run(engine(model), seq)
    assert output[-1] == STOP
    assert re.fullmatch("[0-9]{3,5}", text_of(output)), "as soon as it may"
    assert seq.finish_reason is FinishReason.STOP
    assert seq.stop_token_id == STOP


def test_a_stop_token_never_cuts_the_output_short(model, compiler):
    """Also one that is text: it would not be shown."""
    params = SamplingParams(temperature=0, logit_bias=((ids_of("}")[0], 100.0),))
    seq = sequence(compiler, OBJECT, params, stops=(STOP, *ids_of("}")))
    (output,) = run(engine(model), seq)
    shown = output[:-1] if output[-1] in seq.stop_token_ids else output
    assert not seq.stop_token_ids & set(shown)


def test_what_nothing_can_follow_ends_by_itself(model, compiler):
    """Before min_tokens, and past the end of sequence."""
    for params, stops in ((SamplingParams(temperature=0, min_tokens=50), (STOP,)), (SamplingParams(temperature=0), ())):
        seq = sequence(compiler, CHOICE, params, stops=stops)
        (output,) = run(engine(model), seq)
        assert text_of(output) in json.loads(CHOICE.source)
        assert seq.finish_reason is FinishReason.STOP
        assert seq.stop_token_id is None


def test_min_tokens_goes_on_while_something_can_follow(model, compiler):
    params = SamplingParams(temperature=0, min_tokens=9, logit_bias=((STOP, 100.0),))
    (output,) = run(engine(model), sequence(compiler, Constraint("regex", "[a-z]*"), params))
    assert len(output) == 10
    assert output[-1] == STOP


def test_nothing_may_be_all_that_fits(model, compiler):
    seq = sequence(compiler, Constraint("regex", ""), SamplingParams(temperature=0))
    assert run(engine(model), seq) == [[]]
    assert seq.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1, allowed_token_ids=tuple(ids_of("qx"))),
        SamplingParams(temperature=1, allowed_token_ids=tuple(ids_of("1234567890"))),
        SamplingParams(temperature=1, bad_words=tuple((token,) for token in ids_of("+()"))),
    ],
)
def test_a_dead_end_is_an_error_that_says_why(model, compiler, params, async_scheduling):
    constraint = Constraint("regex", r"1\+x")
    seq, other = sequence(compiler, constraint, params), sequence(compiler, None, SamplingParams(temperature=0))
    plain = run(engine(model), sequence(compiler, None, SamplingParams(temperature=0)))[0]
    outputs = run(engine(model, async_scheduling=async_scheduling), seq, other)
    assert seq.finish_reason is FinishReason.ERROR
    assert "other fields" in seq.error
    assert f"after {len(outputs[0])} tokens" in seq.error
    assert outputs[1] == plain, "its neighbour goes on"


def test_other_rules_join_in(model, compiler):
    params = SamplingParams(temperature=1.5, seed=5, allowed_token_ids=(*ids_of("abc"), STOP), bad_words=(ids_of("b"),))
    (output,) = run(engine(model), sequence(compiler, Constraint("regex", "[a-z]{4,6}"), params))
    assert re.fullmatch("[ac]{4,6}", text_of(output))


def test_logprobs_are_the_models_own(model, compiler):
    """A mask changes what is chosen, not what is reported."""
    seq = sequence(compiler, CHOICE, SamplingParams(temperature=0, logprobs=2))
    free = sequence(compiler, None, SamplingParams(temperature=0, logprobs=2), max_tokens=1)
    both = engine(model)
    both.add(seq)
    both.add(free)
    rows = {}
    while both.has_unfinished:
        for owner, _, logprobs in both.step().logprobs:
            rows.setdefault(owner, []).extend(logprobs)
    assert rows[seq][0].top_ids == rows[free][0].top_ids
    assert rows[seq][0].top_logprobs == rows[free][0].top_logprobs
    assert len(rows[seq]) == seq.num_output


def test_masks_come_from_the_device_unharmed():
    from kernels.token_bitmask import TokenBitmask, mask_logits

    chance = torch.Generator().manual_seed(0)
    for vocab in (1, 31, 32, 33, 128, 1000):
        logits = torch.randn(5, vocab, generator=chance)
        possible = torch.rand(3, vocab, generator=chance) < 0.3
        bits = torch.zeros(3, vocab // 32 + 1, dtype=torch.int64)
        for row, token in possible.nonzero().tolist():
            bits[row, token // 32] |= 1 << token % 32
        bits[:, -1] |= 1 << 31 if vocab % 32 < 31 else 0  # beyond the vocabulary
        bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
        wanted = logits.clone()
        for row, place in enumerate((4, 0, 2)):
            wanted[place, ~possible[row]] = -torch.inf
        assert torch.equal(mask_logits(logits, TokenBitmask(torch.tensor([4, 0, 2]), bits)), wanted)

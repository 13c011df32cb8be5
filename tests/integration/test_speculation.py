"""Speculative decoding through the engine: the output is what it is without drafts, in fewer steps."""

import random

import pytest
import torch

from tests.doubles.tiny_model import VOCAB, save_tiny
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.grammar import Constraint, GrammarCompiler
from worker.sequence import FinishReason, SamplingParams, Sequence, TokenLogprobs, token_array
from worker.speculation.config import SpeculativeConfig
from worker.startup import build_engine
from worker.vocabulary import Vocabulary

NGRAM = SpeculativeConfig("ngram", 4, prompt_lookup_max=4, prompt_lookup_min=1)
STOP = 9
OUTPUT = 40

# Greedy output of a random model soon repeats; what is sampled does so where few tokens are allowed.
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(temperature=1.0, seed=5, allowed_token_ids=(24, 25)),
    "seeded-filtered": SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.05, seed=6),
    "few-tokens": SamplingParams(temperature=1.0, seed=7, allowed_token_ids=(20, 21, 22)),
    "presence": SamplingParams(temperature=0, presence_penalty=0.3, allowed_token_ids=(60, 61, 62, 63)),
    "frequency": SamplingParams(temperature=0, frequency_penalty=0.2),
    "repetition-few-tokens": SamplingParams(
        temperature=1.0, seed=8, repetition_penalty=1.3, frequency_penalty=0.1, allowed_token_ids=(30, 31, 32)
    ),
    "logprobs": SamplingParams(temperature=0, logprobs=3),
    "prompt-logprobs": SamplingParams(
        temperature=0.4, seed=9, logprobs=1, prompt_logprobs=1, allowed_token_ids=(33, 34)
    ),
    "bias": SamplingParams(temperature=0, logit_bias=((5, 6.0), (77, -100.0))),
    "bad-words": SamplingParams(temperature=0, bad_words=((17,), (40, 41)), allowed_token_ids=(17, 40, 41, 42)),
    "min-tokens": SamplingParams(temperature=1, seed=3, min_tokens=20, allowed_token_ids=(STOP, 50, 51)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


@pytest.fixture(autouse=True)
def _threads():
    """Ranks share the cores, and so does the leader, which is this process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def prompts() -> dict[str, list[int]]:
    """Phrases that come again, so that there is something to draft from the first token on."""
    chance = random.Random(5)
    phrases = {name: [chance.randrange(10, VOCAB) for _ in range(chance.randrange(2, 8))] for name in PARAMS}
    return {name: phrase * 3 for name, phrase in phrases.items()}


def engine_for(model, speculative: SpeculativeConfig | None, **settings) -> Engine:
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 72, "block_size": 4, "max_num_seqs": 12}
    defaults |= {"num_gpu_blocks_override": 300, "max_num_batched_tokens": 64}
    engine, _ = build_engine(WorkerConfig(model=model, speculative_config=speculative, **{**defaults, **settings}))
    return engine


def run(engine: Engine, names: list[str]):
    """(output, why it ended, its log-probabilities, those of the prompt) of each, all of them running together."""
    rows: dict[Sequence, list[TokenLogprobs]] = {}
    of_prompt: dict[Sequence, list[TokenLogprobs]] = {}
    outputs: dict[Sequence, list[int]] = {}
    everyone = prompts()
    for name in names:
        tokens = token_array()
        tokens.extend(everyone[name])
        outputs[seq := Sequence(name, tokens, PARAMS[name], OUTPUT, stop_token_ids=frozenset([STOP]))] = []
        engine.add(seq)
    while engine.has_unfinished:
        output = engine.step()
        engine.scheduler.pool.check()
        for seq, first, ids in output.tokens:
            assert first == len(outputs[seq])
            outputs[seq] += ids
        for seq, first, found in output.logprobs:
            assert first == len(rows.setdefault(seq, []))
            rows[seq] += found
        for seq, _, found in output.prompt_logprobs:
            of_prompt.setdefault(seq, []).extend(found)
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_blocks
    return {
        seq.request_id: (ids, seq.finish_reason, rows.get(seq, []), of_prompt.get(seq, []))
        for seq, ids in outputs.items()
    }


def assert_same(got, expected) -> None:
    for name, (ids, reason, rows, of_prompt) in expected.items():
        assert got[name][:2] == (ids, reason), name
        for found, wanted in ((got[name][2], rows), (got[name][3], of_prompt)):
            assert [row.top_ids for row in found] == [row.top_ids for row in wanted], name
            values = [value for row in wanted for value in (row.logprob, *row.top_logprobs)]
            assert [value for row in found for value in (row.logprob, *row.top_logprobs)] == pytest.approx(
                values, abs=1e-4
            )


@pytest.fixture(scope="module")
def plain(model):
    """Without drafts."""
    return run(engine_for(model, None), list(PARAMS))


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("blocks", [300, 24], ids=["roomy", "preempting"])
def test_output_is_the_same(model, plain, async_scheduling, ranks, blocks):
    engine = engine_for(
        model, NGRAM, async_scheduling=async_scheduling, num_gpu_blocks_override=blocks, tensor_parallel_size=ranks
    )
    try:
        assert_same(run(engine, list(PARAMS)), plain)
        scheduler, speculator = engine.scheduler, engine.scheduler.speculator
        assert speculator.num_accepted_tokens > 50
        assert speculator.num_draft_tokens > speculator.num_accepted_tokens, "no draft was wrong: nothing is shown"
        assert (scheduler.num_preemptions > 0) == (blocks == 24)
    finally:
        engine.close()


@pytest.mark.parametrize("name", PARAMS)
def test_alone_each_kind_gives_the_same_in_fewer_steps(model, plain, name):
    """One step for the prompt and one for each later token, less one for each draft that was right."""
    engine = engine_for(model, NGRAM)
    before = engine.num_steps
    assert_same(run(engine, [name]), {name: plain[name]})
    accepted = engine.scheduler.speculator.num_accepted_tokens
    assert accepted > 0
    assert engine.num_steps - before == len(plain[name][0]) - accepted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_nothing_differs(model, dtype):
    """Not in the last bit: a row of a step with drafts is computed as a decoding one is.

    Which of two equally likely alternatives is reported first is left out: it depends on the rows of a step, with
    drafts and without.
    """

    def values(results):
        return {
            name: (ids, reason, [(row.logprob, row.top_logprobs) for row in (*rows, *of_prompt)])
            for name, (ids, reason, rows, of_prompt) in results.items()
        }

    expected = values(run(engine_for(model, None, dtype=dtype), list(PARAMS)))
    engine = engine_for(model, NGRAM, dtype=dtype)
    assert values(run(engine, list(PARAMS))) == expected
    assert engine.scheduler.speculator.num_accepted_tokens > 50


def test_what_is_cached_after_drafts_gives_the_same_again(model, plain):
    """Outputs are sent again as prompts, of which all blocks are found: keys of wrong drafts would show."""
    engine, fresh = engine_for(model, NGRAM), engine_for(model, None, enable_prefix_caching=False)
    run(engine, list(PARAMS))
    for name, prompt in prompts().items():
        text = prompt + plain[name][0]
        results = []
        for each in (engine, fresh):
            tokens = token_array()
            tokens.extend(text)
            seq = Sequence(name, tokens, SamplingParams(temperature=0), 72 - len(text))
            each.add(seq)
            while each.has_unfinished:
                each.step()
            results.append(seq.tokens.tolist())
            if each is engine:
                assert seq.num_cached_tokens == (len(text) - 1) // 4 * 4
        assert results[0] == results[1]


def test_a_sequence_with_a_grammar_takes_no_drafts(model):
    """Its masks need the tokens before them; others beside it do get drafts."""
    vocabulary = Vocabulary([b"", b"", b"", *(bytes([97 + i % 26]) for i in range(VOCAB - 3))], frozenset({0, 1, 2}))
    grammars = GrammarCompiler(vocabulary, VOCAB)
    results = []
    try:
        for speculative in (None, NGRAM):
            engine = engine_for(model, speculative)
            tokens = token_array()
            tokens.extend(prompts()["greedy"])
            bound = Sequence("bound", tokens, PARAMS["greedy"], OUTPUT, stop_token_ids=frozenset([2]))
            bound.automaton = grammars.wait_for_automaton(Constraint("regex", "(abc)+"))
            free = Sequence("free", tokens[:], PARAMS["greedy"], OUTPUT, stop_token_ids=frozenset([STOP]))
            engine.add(bound)
            if speculative is not None:
                while engine.has_unfinished:
                    engine.step()
                assert engine.scheduler.speculator.num_draft_tokens == 0
            engine.add(free)
            while engine.has_unfinished:
                engine.step()
            results.append((bound.tokens, bound.finish_reason, free.tokens, free.finish_reason))
    finally:
        grammars.close()
    assert results[0] == results[1]
    assert engine.scheduler.speculator.num_accepted_tokens > 0


def test_a_cancelled_sequence_leaves_nothing_behind(model, plain):
    """Cancelled while a step with drafts is in flight; the others go on as if it had not been there."""
    engine = engine_for(model, NGRAM, async_scheduling=True)
    tokens = token_array()
    tokens.extend(prompts()["greedy"])
    seq = Sequence("cancelled", tokens, PARAMS["greedy"], OUTPUT)
    engine.add(seq)
    while engine._in_flight is None or not engine._in_flight[0].drafts:
        engine.step()
    known = seq.tokens.tolist()
    engine.cancel(seq)
    assert_same(run(engine, list(PARAMS)), plain)
    assert seq.finish_reason is FinishReason.CANCELLED
    assert seq.tokens.tolist() == known

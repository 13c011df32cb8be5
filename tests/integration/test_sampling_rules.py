"""Biases, bans, penalties and log-probabilities through the engine, against a plain loop over transformers' logits."""

import itertools
import math
import random

import pytest
import torch

from tests.doubles.tiny_model import VOCAB, save_tiny
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.sequence import SamplingParams, Sequence, TokenLogprobs, token_array
from worker.startup import build_engine

STOP = 9
OUTPUT = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny(folder)


def oracle(model, prompt: list[int], params: SamplingParams, max_tokens: int = OUTPUT) -> list[int]:
    """Greedy output under the rules, one token at a time, each rule as its definition says."""
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].double().tolist()
        for token, value in params.logit_bias:
            logits[token] += value
        if params.allowed_token_ids:
            logits = [value if token in params.allowed_token_ids else -math.inf for token, value in enumerate(logits)]
        if len(output) < params.min_tokens:
            logits[STOP] = -math.inf
        for word in params.bad_words:
            before = word[:-1]
            if not before or tuple(output[-len(before) :]) == before:
                logits[word[-1]] = -math.inf
        for token in set(tokens):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(output):
            logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        best = max(range(VOCAB), key=lambda token: logits[token])
        tokens.append(best)
        output.append(best)
        if best == STOP:
            break
    return output


def run(engine: Engine, wanted: list[tuple[list[int], SamplingParams]], max_tokens: int = OUTPUT):
    """(output, its log-probabilities, the prompt's by index) of each, all of them running together."""
    sequences = []
    logprobs: dict[Sequence, list[TokenLogprobs]] = {}
    prompts: dict[Sequence, dict[int, TokenLogprobs]] = {}
    for prompt, params in wanted:
        tokens = token_array()
        tokens.extend(prompt)
        sequences.append(Sequence("test", tokens, params, max_tokens, stop_token_ids=frozenset([STOP])))
        engine.add(sequences[-1])
    while engine.has_unfinished:
        output = engine.step()
        for seq, first, rows in output.logprobs:
            assert first == len(logprobs.setdefault(seq, []))
            logprobs[seq] += rows
        for seq, first, rows in output.prompt_logprobs:
            known = prompts.setdefault(seq, {})
            for index, row in enumerate(rows, start=first):
                assert index not in known, "a prompt token was reported twice"
                known[index] = row
    return [
        (seq.tokens.tolist()[seq.num_prompt_tokens :], logprobs.get(seq, []), prompts.get(seq, {})) for seq in sequences
    ]


RULES = {
    "plain": SamplingParams(temperature=0),
    "presence": SamplingParams(temperature=0, presence_penalty=2.0),
    "frequency": SamplingParams(temperature=0, frequency_penalty=1.5),
    "negative-frequency": SamplingParams(temperature=0, frequency_penalty=-1.0),
    "repetition": SamplingParams(temperature=0, repetition_penalty=1.7),
    "all-penalties": SamplingParams(temperature=0, presence_penalty=0.9, frequency_penalty=0.9, repetition_penalty=1.5),
    "bias": SamplingParams(temperature=0, logit_bias=((5, 6.0), (77, -100.0), (30, 3.0))),
    "forced": SamplingParams(temperature=0, logit_bias=((5, 100.0),)),
    "allowed": SamplingParams(temperature=0, allowed_token_ids=tuple(range(40, 60))),
    "allowed-with-bias-and-penalty": SamplingParams(
        temperature=0, allowed_token_ids=(3, 4, 5), logit_bias=((4, 5.0),), frequency_penalty=1.0
    ),
    "bad-words": SamplingParams(temperature=0, bad_words=((17,), (40, 41), (1, 2, 3))),
    "min-tokens": SamplingParams(temperature=0, min_tokens=20, logit_bias=((STOP, 50.0),)),
}


@pytest.fixture(scope="module")
def prompts():
    chance = random.Random(5)
    return {name: [chance.randrange(10, VOCAB) for _ in range(chance.randrange(1, 40))] for name in RULES}


@pytest.fixture(scope="module")
def expected(model, prompts):
    return {name: oracle(model[1], prompts[name], params) for name, params in RULES.items()}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("blocks", [200, 20], ids=["roomy", "preempting"])
def test_rules_together_give_each_its_own_output(model, prompts, expected, async_scheduling, blocks):
    config = WorkerConfig(
        model=model[0], dtype="float32", max_model_len=72, block_size=4, num_gpu_blocks_override=blocks,
        max_num_batched_tokens=64, max_num_seqs=12, async_scheduling=async_scheduling,
    )  # fmt: skip
    engine, _ = build_engine(config)
    results = run(engine, [(prompts[name], params) for name, params in RULES.items()])
    for name, (output, _, _) in zip(RULES, results, strict=True):
        assert output == expected[name], name
    assert (engine.scheduler.num_preemptions > 0) == (blocks == 20)


def test_the_rules_do_something(expected, model, prompts):
    for name, params in RULES.items():
        plain = oracle(model[1], prompts[name], SamplingParams(temperature=0))
        assert name in ("plain", "bad-words") or expected[name] != plain, f"{name} changes nothing here"
        if name == "min-tokens":
            assert len(expected[name]) == params.min_tokens + 1


def test_a_long_bad_word_is_kept_out(model, prompts):
    """The output's own second and third token, banned as a pair: they may not follow each other any more."""
    engine, _ = build_engine(
        WorkerConfig(model=model[0], dtype="float32", kv_cache_memory_bytes=1 << 21, async_scheduling=True)
    )
    prompt = prompts["plain"]
    ((free, _, _),) = run(engine, [(prompt, SamplingParams(temperature=0))])
    pair = (free[1], free[2])
    params = SamplingParams(temperature=0, bad_words=(pair,))
    ((output, _, _),) = run(engine, [(prompt, params)])
    assert pair in set(itertools.pairwise(free))
    assert pair not in set(itertools.pairwise(output))
    assert output == oracle(model[1], prompt, params)


@pytest.mark.parametrize(("budget", "ranks"), [(64, 1), (7, 1), (7, 2)])
def test_logprobs_of_output_and_prompt(model, prompts, budget, ranks):
    """Against log-softmax of transformers' logits; rules and temperature do not change what is reported."""
    engine, _ = build_engine(
        WorkerConfig(
            model=model[0], dtype="float32", kv_cache_memory_bytes=1 << 21, max_num_batched_tokens=budget,
            max_num_seqs=4, tensor_parallel_size=ranks, device="auto" if ranks == 1 else "cpu",
        )
    )  # fmt: skip
    prompt = prompts["allowed"]
    params = SamplingParams(temperature=0.7, seed=3, logprobs=3, prompt_logprobs=2, frequency_penalty=1.0)
    only_chosen = SamplingParams(temperature=0, logprobs=0)
    (output, rows, of_prompt), (greedy, greedy_rows, none), (_, nothing, _) = run(
        engine, [(prompt, params), (prompt, only_chosen), (prompt, SamplingParams(temperature=0))]
    )
    engine.close()
    with torch.inference_mode():
        reference = model[1](torch.tensor([prompt + output])).logits[0].log_softmax(-1)
        greedy_reference = model[1](torch.tensor([prompt + greedy])).logits[0].log_softmax(-1)
    assert len(rows) == len(output)
    for index, row in enumerate(rows):
        at = reference[len(prompt) + index - 1]
        assert row.logprob == pytest.approx(at[output[index]].item(), abs=1e-4)
        assert row.top_ids == at.topk(3).indices.tolist()
        assert row.top_logprobs == pytest.approx(at.topk(3).values.tolist(), abs=1e-4)
    assert sorted(of_prompt) == list(range(1, len(prompt)))
    for index, row in of_prompt.items():
        assert row.logprob == pytest.approx(reference[index - 1][prompt[index]].item(), abs=1e-4)
        assert row.top_ids == reference[index - 1].topk(2).indices.tolist()
    assert [row.top_ids for row in greedy_rows] == [[]] * len(greedy)
    for index, row in enumerate(greedy_rows):
        assert row.logprob == pytest.approx(greedy_reference[len(prompt) + index - 1].max().item(), abs=1e-4)
    assert not none
    assert not nothing


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it(model, prompts):
    engine, _ = build_engine(WorkerConfig(model=model[0], dtype="float32", kv_cache_memory_bytes=1 << 21, block_size=4))
    prompt = [*prompts["allowed"], *prompts["bias"]]
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    for _ in range(2):
        ((_, _, of_prompt),) = run(engine, [(prompt, params)])
        assert len(of_prompt) == len(prompt) - 1
    tokens = token_array()
    tokens.extend(prompt)
    plain = Sequence("plain", tokens, SamplingParams(temperature=0), 1)
    engine.add(plain)
    while engine.has_unfinished:
        engine.step()
    assert plain.num_cached_tokens == (len(prompt) - 1) // 4 * 4

"""The offline API with the demo model: what transformers generates, streamed, stopped, shared and given up."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams, StructuredOutputsParams
from router.errors import InternalError
from router.prompt import encode_words
from tests.doubles.tiny_model import save_tiny
from tests.doubles.tiny_vocabulary import save_tokenizer
from worker.sequence import FinishReason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
COUNTING = "One, two, three,"
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
# A short first step keeps the start short.
SMALL = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 128}


@pytest.fixture(scope="module")
def llm(demo_model):
    """float32, and steps that overlap as on a GPU."""
    llm = LLM(demo_model, **SMALL, max_num_seqs=8, async_scheduling=True)
    yield llm
    llm.llm_engine.close()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A folder for what any model shows."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def engine(llm):
    """The engine between two tests: nothing runs, and every block is free."""
    yield llm.llm_engine
    llm.llm_engine.abort_request(list(llm.llm_engine._requests))
    check_at_rest(llm.llm_engine)


def check_at_rest(engine: LLMEngine) -> None:
    assert not engine.has_unfinished_requests()
    assert not engine._choices
    pool = engine._engine.scheduler.pool
    pool.check()
    assert pool.num_available == pool.num_blocks


def steps(engine: LLMEngine, request_id: str, prompt, params: SamplingParams):
    """All outputs of one request."""
    engine.add_request(request_id, prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine._engine.scheduler.pool.check()
    return outputs


def run_to_the_end(engine: LLMEngine):
    """All outputs of the unfinished requests."""
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


# ---- whole answers


def test_greedy_ids_are_those_of_transformers(llm, greedy_oracle):
    tokenizer = greedy_oracle.tokenizer
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    texts = ["The capital of France is", COUNTING]
    ids = [*(tokenizer(text)["input_ids"] for text in texts), chat]
    outputs = llm.generate(texts, GREEDY, use_tqdm=False) + llm.chat(question, GREEDY, use_tqdm=False)
    for output, prompt, expected in zip(outputs, ids, greedy_oracle(ids, 20), strict=True):
        [completion] = output.outputs
        assert output.prompt_token_ids == prompt
        assert completion.token_ids == expected.tokens
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        ended = completion.token_ids[-1] == tokenizer.eos_token_id
        assert completion.finish_reason == ("stop" if ended else "length")
        assert output.finished
    assert outputs[2].prompt == tokenizer.decode(chat)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "length"}


def test_outputs_come_in_the_prompts_order_each_with_its_parameters(llm):
    prompts = [COUNTING, [1, 2, 3], {"prompt_token_ids": [5], "prompt": "named"}]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (9, 2, 5)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 5]
    assert [output.prompt for output in outputs] == [COUNTING, None, "named"]
    assert llm.generate([], use_tqdm=False) == []


def test_the_same_seed_gives_the_same_text_in_any_batch(llm):
    params = SamplingParams(seed=7, max_tokens=12)
    [alone] = llm.generate(COUNTING, params, use_tqdm=False)
    among_others = llm.generate(["Once", COUNTING, "The sea"], params, use_tqdm=False)[1]
    assert among_others.outputs == alone.outputs


def test_log_probabilities(llm):
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(COUNTING, params, use_tqdm=False)
    [completion] = output.outputs
    assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
    assert all(len(entry) == 2 for entry in completion.logprobs)  # greedy: the token is one of the two
    chosen = [entry[token_id] for entry, token_id in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert [one.rank for one in chosen] == [1] * 4
    assert "".join(one.decoded_token for one in chosen) == completion.text
    assert completion.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    # What the prompt's last token gets as output is what it has as prompt.
    [longer] = llm.generate([[*output.prompt_token_ids, completion.token_ids[0]]], params, use_tqdm=False)
    last = longer.prompt_logprobs[-1][completion.token_ids[0]]
    assert last.logprob == pytest.approx(chosen[0].logprob, abs=1e-4)
    assert last.rank == 1


def test_special_tokens_and_text_on_demand(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    [shown] = llm.chat(
        question, SamplingParams(temperature=0, ignore_eos=True, skip_special_tokens=False), use_tqdm=False
    )
    [hidden] = llm.chat(question, SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
    [silent] = llm.chat(question, SamplingParams(temperature=0, ignore_eos=True, detokenize=False), use_tqdm=False)
    assert "<|im_end|>" in shown.outputs[0].text
    assert "<|im_end|>" not in hidden.outputs[0].text
    assert silent.outputs[0].text == ""
    assert shown.outputs[0].token_ids == hidden.outputs[0].token_ids == silent.outputs[0].token_ids


def structured(**constraint) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=60, structured_outputs=StructuredOutputsParams(**constraint))


def test_outputs_are_what_they_must_be(llm):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    params = [
        structured(json={**schema, "additionalProperties": False}), structured(regex="[A-Z][a-z]{2,6}!"),
        structured(choice=["London", "Paris"]), structured(grammar='root ::= "<" [0-9]+ ">"'), GREEDY,
    ]  # fmt: skip
    outputs = llm.generate([COUNTING] * len(params), params, use_tqdm=False)
    whole, pattern, choice, grammar, free = (output.outputs[0] for output in outputs)
    assert isinstance(json.loads(whole.text)["n"], int)
    assert re.fullmatch("[A-Z][a-z]{2,6}!", pattern.text)
    assert choice.text in ("London", "Paris")
    assert re.fullmatch("<[0-9]+>", grammar.text)
    assert {whole.finish_reason, pattern.finish_reason, choice.finish_reason} == {"stop"}
    assert [free] == llm.generate(COUNTING, GREEDY, use_tqdm=False)[0].outputs
    [whole] = llm.generate(COUNTING, structured(json_object=True), use_tqdm=False)
    assert whole.outputs[0].text.startswith("{")


def test_an_output_that_cannot_be_is_refused_by_name(llm, engine):
    with pytest.raises(ValueError, match=r"structured_outputs\.regex: (?s:.*)unclosed"):
        llm.generate(COUNTING, structured(regex="(["), use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompt 1 of 2: structured_outputs\.grammar: (?s:.*)nowhere"):
        llm.generate([COUNTING] * 2, [GREEDY, structured(grammar="start: nowhere")], use_tqdm=False)
    dead_end = dataclasses.replace(structured(choice=["yes"]), allowed_token_ids=[100])
    engine.add_request("lasts", COUNTING, GREEDY)
    engine.add_request("dead end", COUNTING, dead_end)
    with pytest.raises(ValueError, match=r"structured_outputs\.choice: .*other fields"):
        run_to_the_end(engine)
    assert run_to_the_end(engine)[-1].request_id == "lasts"


def test_the_prefix_cache_can_be_left_aside(llm):
    prompt = [11] * 64
    first = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    again = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    aside = llm.generate(prompt, dataclasses.replace(GREEDY, skip_reading_prefix_cache=True), use_tqdm=False)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens, aside.num_cached_tokens) == (0, 48, 0)
    assert first.outputs == again.outputs == aside.outputs


# ---- the progress bar


def test_the_progress_bar_says_tokens_per_second_and_can_be_off(llm, capsys):
    llm.generate([COUNTING, COUNTING], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown
    llm.generate([COUNTING], GREEDY, use_tqdm=False)
    llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


# ---- step by step


def test_deltas_join_to_the_text_and_cumulative_outputs_grow_to_it(engine):
    [final] = steps(engine, "final", COUNTING, SamplingParams(**FIELDS, output_kind=RequestOutputKind.FINAL_ONLY))
    deltas = steps(engine, "delta", COUNTING, SamplingParams(**FIELDS, output_kind=RequestOutputKind.DELTA))
    growing = steps(engine, "all", COUNTING, SamplingParams(**FIELDS))
    [whole] = final.outputs
    assert len(deltas) > 10
    assert "".join(output.outputs[0].text for output in deltas) == whole.text
    assert [token_id for output in deltas for token_id in output.outputs[0].token_ids] == whole.token_ids
    assert [entry for output in deltas for entry in output.outputs[0].logprobs] == whole.logprobs
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    assert growing[-1].outputs == final.outputs
    for earlier, later in itertools.pairwise(growing):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)
        assert later.outputs[0].token_ids[:-1] == earlier.outputs[0].token_ids
    metrics = final.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time < metrics.finished_time


FIELDS = {"temperature": 0.0, "max_tokens": 20, "logprobs": 1}


def test_three_choices_share_the_prompt(engine):
    prompt = [7] * 100
    pool = engine._engine.scheduler.pool
    params = SamplingParams(n=3, seed=3, max_tokens=8, ignore_eos=True)
    engine.add_request("three", prompt, params)
    outputs = engine.step()
    assert not outputs  # the first step is still running when the second is planned
    in_use = pool.num_blocks - pool.num_available
    # Six full blocks of 16 tokens together, one or two of its own for each choice.
    assert 9 <= in_use <= 12
    while engine.has_unfinished_requests():
        outputs += engine.step()
    last = outputs[-1]
    assert [completion.index for completion in last.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in last.outputs}) == 3
    assert last.num_cached_tokens == 0
    [second] = steps(engine, "second", prompt, SamplingParams(seed=4, max_tokens=8, ignore_eos=True))[-1:]
    assert second.num_cached_tokens == 96
    assert second.outputs[0].token_ids == last.outputs[1].token_ids


@pytest.mark.parametrize("stop", ["six", ", fi", "e, s"])
def test_a_stop_string_never_shows(engine, stop):
    deltas = steps(
        engine, "stopped", COUNTING, SamplingParams(**FIELDS, stop=[stop], output_kind=RequestOutputKind.DELTA)
    )
    text = "".join(output.outputs[0].text for output in deltas)
    [whole] = steps(engine, "whole", COUNTING, SamplingParams(**FIELDS, output_kind=RequestOutputKind.FINAL_ONLY))
    assert text == whole.outputs[0].text.split(stop)[0]
    assert (deltas[-1].outputs[0].finish_reason, deltas[-1].outputs[0].stop_reason) == ("stop", stop)
    kept = steps(engine, "kept", COUNTING, SamplingParams(**FIELDS, stop=stop, include_stop_str_in_output=True))
    assert kept[-1].outputs[0].text == text + stop


def test_a_stop_token_ends_the_text_before_itself(engine):
    whole = steps(engine, "whole", COUNTING, GREEDY)[-1].outputs[0]
    token_id = whole.token_ids[4]
    stopped = steps(engine, "one", COUNTING, SamplingParams(**FIELDS, stop_token_ids=[token_id]))[-1].outputs[0]
    length = whole.token_ids.index(token_id) + 1
    assert stopped.token_ids == whole.token_ids[:length]
    assert whole.text.startswith(stopped.text)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token_id)


def test_an_abort_frees_blocks_at_once_and_leaves_others_alone(engine):
    expected = steps(engine, "alone", COUNTING, GREEDY)[-1].outputs
    pool = engine._engine.scheduler.pool
    engine.add_request("gone", [9] * 200, SamplingParams(n=2, max_tokens=200, ignore_eos=True))
    for _ in range(3):
        engine.step()
    held = pool.num_available
    engine.add_request("stays", COUNTING, GREEDY)
    engine.add_request("never ran", COUNTING, GREEDY)
    engine.abort_request(["gone", "never ran", "unknown"])
    assert pool.num_available > held
    assert engine.get_num_unfinished_requests() == 1
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"stays"}
    assert outputs[-1].outputs == expected


# ---- errors


def test_a_wrong_request_is_refused_before_anything_runs(llm, engine):
    before = engine._engine.num_steps
    vocabulary = engine._limits.vocab_size
    single = [ids[0] for ids in encode_words(engine._tokenizer, ("yes",)) if len(ids) == 1]
    for prompt, params, message in [
        ("", GREEDY, "prompt"),
        ([], GREEDY, "prompt"),
        ([vocabulary], GREEDY, r"prompt_token_ids\[0\]"),
        ([1] * 512, GREEDY, "prompt_token_ids"),
        ("a " * 100_000, GREEDY, "prompt"),
        ("a", SamplingParams(max_tokens=600), "max_tokens"),
        ("a", SamplingParams(stop_token_ids=[vocabulary]), r"stop_token_ids\[0\]"),
        ("a", SamplingParams(logit_bias={vocabulary: 1.0}), "logit_bias"),
        ("a", SamplingParams(allowed_token_ids=[vocabulary]), "allowed_token_ids"),
        ("a", SamplingParams(allowed_token_ids=single, bad_words=["yes"]), "leave none to choose from"),
        ("a", SamplingParams(allowed_token_ids=[2], min_tokens=3), "leave none to choose from"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.add_request("wrong", prompt, params)
    with pytest.raises(ValueError, match=r"prompt 1 of 2: .*'nothing'"):
        llm.generate([COUNTING, {"nothing": 1}], GREEDY)
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        llm.generate(COUNTING, [GREEDY, GREEDY])
    with pytest.raises(ValueError, match=r"messages\[0\].role"):
        llm.chat([{"role": "", "content": "Hi"}], GREEDY)
    with pytest.raises(ValueError, match="request_id"):
        engine.add_request("", COUNTING, GREEDY)
    with pytest.raises(ValueError, match="priority is 1"):
        engine.add_request("a", COUNTING, GREEDY, priority=1)
    with pytest.raises(ValueError, match="priority is 'high'"):
        engine.add_request("a", COUNTING, GREEDY, priority="high")
    assert not engine.has_unfinished_requests()
    assert engine._engine.num_steps == before


def test_an_id_is_taken_until_its_request_ends(engine, llm):
    engine.add_request("same", COUNTING, GREEDY)
    with pytest.raises(ValueError, match="request_id is 'same'"):
        engine.add_request("same", COUNTING, GREEDY)
    with pytest.raises(RuntimeError, match="1 requests"):
        llm.generate(COUNTING, GREEDY, use_tqdm=False)
    engine.abort_request("same")
    assert steps(engine, "same", COUNTING, GREEDY)[-1].finished


def test_a_request_that_fails_does_not_take_others_with_it(engine):
    engine.add_request("fails", "Once", GREEDY)
    engine.add_request("lasts", COUNTING, GREEDY)
    for _ in range(3):
        engine.step()
    [(seq, _)] = engine._requests["fails"].sequences
    engine._engine.cancel(seq, FinishReason.ERROR)
    with pytest.raises(InternalError):
        engine.step()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].request_id == "lasts"
    assert len(outputs[-1].outputs[0].token_ids) == 20


def test_an_engine_that_failed_or_was_closed_says_so(tiny_model, monkeypatch):
    engine = LLMEngine.from_engine_args(EngineArgs(model=tiny_model, dtype="float32"))
    engine.add_request("a", COUNTING, GREEDY)
    monkeypatch.setattr(engine._engine._runner, "launch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(RuntimeError, match="failed in a step: ZeroDivisionError"):
        engine.step()
    engine.close()
    engine.close()
    assert not engine.has_unfinished_requests()
    with pytest.raises(RuntimeError, match="failed in a step: ZeroDivisionError"):
        engine.add_request("a", COUNTING, GREEDY)


def test_a_closed_engine_says_so(tiny_model):
    engine = LLMEngine.from_engine_args(EngineArgs(model=tiny_model, dtype="float32"))
    engine.add_request("a", COUNTING, GREEDY)
    engine.close()
    assert not engine.has_unfinished_requests()
    with pytest.raises(RuntimeError, match="is closed"):
        engine.add_request("a", COUNTING, GREEDY)


def test_settings_that_do_not_fit_the_model_are_refused_by_name(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"^max_model_len is 100000"):
        LLM(tiny_model, max_model_len=100_000)
    with pytest.raises(ValueError, match="tokenizer"):
        LLM(tiny_model, tokenizer=tmp_path)


# ---- ranks, the example


def test_ranks_give_the_same_text_and_end_with_the_interpreter(tiny_model, tmp_path):
    alone = LLM(tiny_model, dtype="float32")
    expected = alone.generate(COUNTING, GREEDY, use_tqdm=False)[0].outputs
    alone.llm_engine.close()
    code = f"""
from quire import LLM, SamplingParams, StructuredOutputsParams
settings = dict(dtype="float32", device="cpu", tensor_parallel_size=2)
llm = LLM({str(tiny_model)!r}, **settings)
print(llm.generate({COUNTING!r}, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)[0].outputs)
try:
    LLM({str(tiny_model)!r}, **settings)
except ValueError as error:
    print(error)
digits = SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(regex="[0-9]{{4}}"))
print(llm.generate({COUNTING!r}, digits, use_tqdm=False)[0].outputs[0].text)
print([rank.process.pid for rank in llm.llm_engine._engine._runner._ranks._ranks])
"""
    done = run_elsewhere(tmp_path, "-c", code)
    text, refusal, digits, pids = done.stdout.splitlines()
    assert text == str(expected)
    assert re.fullmatch("[0-9]{4}", digits)
    assert "tensor_parallel_size is 2, but this process already has" in refusal
    for pid in json.loads(pids):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_example_runs(demo_model, tmp_path):
    done = run_elsewhere(tmp_path, str(ROOT / "docs" / "offline.py"), "--model", str(demo_model))
    assert "The capital of France is| Paris" in done.stdout
    assert re.search("^One of three: (London|Paris|Rome)$", done.stdout, re.MULTILINE)
    assert "[0, stop]" in done.stdout or "[0, length]" in done.stdout
    assert " steps]" in done.stdout


def run_elsewhere(folder: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    """A Python program that is started in another folder, where a worker package of somebody else's lies."""
    (folder / "worker").mkdir()
    (folder / "worker" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, *args], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert not done.returncode, done.stderr
    return done

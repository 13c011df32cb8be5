"""What a caller of the offline API may write, and how it is refused."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

import worker.config
from protos import sampling_pb2
from quire import EngineArgs, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.offline.prompts import ChatPrompt, one_by_one, put_prompt
from worker.config import WorkerConfig
from worker.speculation.config import SpeculativeConfig

# ---- SamplingParams


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.top_p, params.top_k) == (1, 16, 1.0, 1.0, 0)
    request = params.to_request()
    assert not request.sampling.HasField("seed")
    assert request.output.text
    assert not request.output.HasField("logprobs")


def test_every_field_reaches_the_request():
    request = SamplingParams(
        n=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=-1,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={5: 2.0},
        allowed_token_ids=[5, 6],
        bad_words=["no"],
        max_tokens=9,
        min_tokens=2,
        stop="end",
        stop_token_ids=[8],
        ignore_eos=True,
        include_stop_str_in_output=True,
        logprobs=4,
        prompt_logprobs=0,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    ).to_request()
    sampling, stopping, output = request.sampling, request.stopping, request.output
    assert (request.n, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (3, 0.5, 0.25, 7, 0.125)
    assert sampling.seed == 2**64 - 1  # as the gateway writes it
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.5, -0.5, 1.25)
    assert (dict(sampling.logit_bias), list(sampling.allowed_token_ids)) == ({5: 2.0}, [5, 6])
    assert (stopping.max_tokens, stopping.min_tokens, list(stopping.stop)) == (9, 2, ["end"])
    assert (list(stopping.stop_token_ids), list(stopping.bad_words)) == ([8], ["no"])
    assert stopping.ignore_eos
    assert stopping.include_stop_str_in_output
    assert (output.logprobs, output.prompt_logprobs, output.final_only) == (4, 0, True)
    assert request.skip_reading_prefix_cache


def test_minus_one_is_no_top_k():
    assert SamplingParams(top_k=-1).to_request().sampling.top_k == 0


WRONG = {
    "n": [0, 9, 1.5, True, "2", None],
    "temperature": [-0.1, 2.1, float("nan"), float("inf"), "hot", None],
    "top_p": [0, 1.1, None],
    "top_k": [-2, 2**32, 1.0],
    "min_p": [-0.1, 1.5],
    "seed": [2**64, -(2**63) - 1, 0.5],
    "presence_penalty": [2.5],
    "frequency_penalty": [-2.5],
    "repetition_penalty": [0, -1],
    "logit_bias": [{5: 101.0}, {-1: 1.0}, {"5": 1.0}, {5: "x"}, [5]],
    "allowed_token_ids": [[], [-1], ["a"], 5],
    "bad_words": [[""], "word", [5]],
    "max_tokens": [0, -1, 2.0],
    "min_tokens": [-1, 17, None],
    "stop": [[""], ["a"] * 17, 5, [5]],
    "stop_token_ids": [[-1], "5", 5],
    "ignore_eos": [1, None],
    "include_stop_str_in_output": ["no"],
    "logprobs": [-1, 21, True],
    "prompt_logprobs": [21],
    "structured_outputs": [{"regex": "a"}, "a"],
    "skip_reading_prefix_cache": [None, 1],
    "skip_special_tokens": [None],
    "detokenize": [0],
    "output_kind": [2, "delta"],
}


def test_every_field_has_wrong_values():
    assert WRONG.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"json": {"enum": ["é", 1]}}, "json_schema", '{"enum": ["é", 1]}'),
        ({"json": '{"type": "string"}'}, "json_schema", '{"type": "string"}'),
        ({"regex": "[ab]+", "json_object": False}, "regex", "[ab]+"),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"json_object": True}, "json_object", True),
        ({"choice": ["yes", "no"]}, "choices", sampling_pb2.Choices(texts=["yes", "no"])),
    ],
)
def test_every_kind_of_structured_output_reaches_the_request(given, kind, value):
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(**given)).to_request().sampling
    assert sampling.WhichOneof("constraint") == kind
    assert getattr(sampling, kind) == value


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "has none of json"),
        ({"json_object": False}, "has none of json"),
        ({"regex": "a", "choice": ["a"]}, "has regex and choice of json"),
        ({"json": 5}, r"structured_outputs\.json is 5"),
        ({"json": {"a": object()}}, r"structured_outputs\.json cannot be written down"),
        ({"regex": ["a"]}, r"structured_outputs\.regex is"),
        ({"choice": "ab"}, r"structured_outputs\.choice is 'ab'"),
        ({"choice": [1]}, r"structured_outputs\.choice is"),
        ({"grammar": 5}, r"structured_outputs\.grammar is 5"),
        ({"json_object": "yes"}, r"structured_outputs\.json_object is 'yes'"),
        # What the router refuses.
        ({"json": "no JSON"}, r"structured_outputs\.json: json_schema is not JSON"),
        ({"json": "[1]"}, r"structured_outputs\.json: json_schema must be a JSON object"),
        ({"choice": []}, r"structured_outputs\.choice: "),
        ({"choice": ["a", ""]}, r"structured_outputs\.choice\[1\]: "),
        ({"regex": ""}, r"structured_outputs\.regex: "),
    ],
)
def test_a_wrong_structured_output_is_refused_by_name(given, named):
    with pytest.raises(ValueError, match=named):
        SamplingParams(structured_outputs=StructuredOutputsParams(**given))


# ---- EngineArgs


def engine_flags() -> dict[str, object]:
    parser = argparse.ArgumentParser(add_help=False)
    worker.config.add_arguments(parser, listen=False)
    return {action.dest: action.default for action in parser._actions}


def test_engine_args_are_the_workers_flags():
    fields = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    assert {name: fields[name] for name in fields.keys() - {"model", "tokenizer", "chat_template"}} == engine_flags()


def test_engine_args_become_the_workers_settings():
    values = {
        "dtype": "float32",
        "max_model_len": 128,
        "tensor_parallel_size": 2,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "block_size": 32,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 1 << 20,
        "kv_cache_dtype": "fp8",
        "shared_prefix_attention": False,
        "async_scheduling": False,
        "enforce_eager": True,
        "seed": 5,
    }
    assert EngineArgs(**values).worker_config(Path("m")) == WorkerConfig(model=Path("m"), **values)
    assert EngineArgs().worker_config(Path("m")) == WorkerConfig(model=Path("m"))


def test_the_speculative_config_is_a_dict_or_its_json():
    fields = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    for given in (fields, json.dumps(fields)):
        config = EngineArgs(speculative_config=given).worker_config(Path("m"))
        assert config.speculative_config == SpeculativeConfig(**fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", "many"),
        ("max_model_len", -5),
        ("max_model_len", 1.5),
        ("dtype", "int3"),
        ("load_format", "pickle"),
        ("block_size", 12),
        ("gpu_memory_utilization", 1.5),
        ("quantization", "no-such-method"),
        ("kv_cache_dtype", "no-such-type"),
        ("enforce_eager", "no"),
        ("enable_prefix_caching", None),
        ("async_scheduling", 1),
        ("speculative_config", {"method": "medusa", "num_speculative_tokens": 4}),
        ("speculative_config", "{"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name) as refusal:
        EngineArgs(**{name: value}).worker_config(Path("m"))
    assert "--" not in str(refusal.value)


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="pipeline_parallel_size"):
        EngineArgs(pipeline_parallel_size=2)


# ---- prompts


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("one", 1),
        ([1, 2, 3], 1),
        ({"prompt": "one"}, 1),
        (["one", "two"], 2),
        ([[1], [2, 3]], 2),
        (["one", [2], {"prompt_token_ids": [3]}], 3),
        ([], 0),
    ],
)
def test_one_or_several_prompts(prompts, count):
    assert len(one_by_one(prompts)) == count


@pytest.mark.parametrize("prompts", [None, 5])
def test_what_is_no_prompt_at_all_is_refused(prompts):
    with pytest.raises(ValueError, match=f"prompts is {prompts}; it must be a string"):
        one_by_one(prompts)


def request_for(prompt):
    request = SamplingParams().to_request()
    return request, put_prompt(request, prompt)


def test_prompts_in_all_forms():
    request, text = request_for("one")
    assert (request.text, text) == ("one", "one")
    request, text = request_for([1, 2])
    assert (list(request.token_ids.ids), text) == ([1, 2], None)
    request, text = request_for({"prompt_token_ids": (1,), "prompt": "one", "cache_salt": "mine"})
    assert (list(request.token_ids.ids), text, request.cache_salt) == ([1], "one", "mine")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request, _ = request_for(ChatPrompt([{"role": "developer", "content": parts}], add_generation_prompt=False))
    assert (request.chat.messages[0].role, request.chat.messages[0].content) == ("system", "ab")
    assert not request.chat.add_generation_prompt


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (5, "a prompt is 5"),
        (b"bytes", "bytes"),
        ("a\udc80", "surrogate, which is no character, at position 1"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({}, "prompt_token_ids"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"),
        ([1, "a"], r"prompt_token_ids\[1\]"),
        ({"prompt_token_ids": [1, -1]}, r"prompt_token_ids\[1\]"),
        (ChatPrompt(["hello"]), r"messages\[0\]"),
        (ChatPrompt([{"content": "a"}]), r"messages\[0\].role"),
        (ChatPrompt([{"role": "user"}]), r"messages\[0\].content"),
        (ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]), r"messages\[0\].content"),
        (ChatPrompt([{"role": "user", "content": "a", "tool_calls": []}]), "tool_calls"),
        (ChatPrompt([{"role": "user", "content": "a", "name": 5}]), r"messages\[0\].name"),
    ],
)
def test_a_wrong_prompt_is_refused_by_name(prompt, named):
    with pytest.raises(ValueError, match=named):
        request_for(prompt)

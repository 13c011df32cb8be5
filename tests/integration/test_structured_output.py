"""Constrained requests through the three processes, with the demo model."""

import concurrent.futures
import json
import re
import time

import httpx
import jsonschema
import pytest

from tests.doubles.processes import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def stack(demo_model):
    stack = Stack(demo_model, "--max-model-len", "1024")
    stack.start()
    yield stack
    assert stack.close() == {"gateway": 0, "router": 0, "worker": 0}


def chat(stack, **fields):
    body = {"model": "model", "messages": [{"role": "user", "content": "Tell me about Paris."}], "max_tokens": 120}
    return httpx.post(f"{stack.url}/v1/chat/completions", json={**body, **fields}, timeout=120)


def text_of(response) -> str:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["message"]["content"]


def schema_format(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_a_schema_is_kept(stack, temperature):
    text = text_of(chat(stack, response_format=schema_format(SCHEMA), temperature=temperature, seed=3))
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"\d{4}-\d{2}-\d{2}"}, r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        ({"choice": ["London", "Paris", "Rome"]}, "London|Paris|Rome"),
        ({"grammar": 'start: "<" WORD ("," WORD){0,3} ">"\nWORD: /[a-z]{1,6}/'}, r"<[a-z]{1,6}(,[a-z]{1,6}){0,3}>"),
        ({"grammar": 'root ::= ("é" | "漢" | "🥞"){3}'}, r"[é漢🥞]{3}"),
        ({"json": {"enum": [1, 2]}}, "[12]"),
    ],
)
def test_each_of_vllms_ways(stack, outputs, pattern):
    for temperature in (0, 2):
        text = text_of(chat(stack, structured_outputs=outputs, temperature=temperature))
        assert re.fullmatch(pattern, text), text


def test_choices_of_one_request_are_each_complete(stack):
    response = chat(stack, guided_regex="[a-c]{8}", n=4, temperature=2, seed=1, logprobs=True)
    texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert all(re.fullmatch("[a-c]{8}", text) for text in texts)
    assert len(set(texts)) > 1
    for choice in response.json()["choices"]:
        told = "".join(entry["token"] for entry in choice["logprobs"]["content"])
        assert told == choice["message"]["content"]


def test_greedy_output_does_not_depend_on_company(stack):
    requests = [
        {"response_format": schema_format(SCHEMA)}, {"guided_regex": "[A-Z][a-z ]{10,30}\\."}, {"max_tokens": 30},
        {"response_format": schema_format(SCHEMA), "messages": [{"role": "user", "content": "And Rome?"}]},
    ]  # fmt: skip

    def ask(fields):
        return chat(stack, temperature=0, **fields).json()["choices"][0]["message"]["content"]

    alone = [ask(fields) for fields in requests]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        together = list(threads.map(ask, requests * 3))
    assert together == alone * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": schema_format({"type": "colour"})}, "response_format.json_schema.schema", "colour"),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex", "unclosed"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice.1", "empty"),
    ],
)
def test_a_wrong_constraint_is_a_400_that_names_it(stack, fields, param, said, stream):
    response = chat(stack, stream=stream, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert said in error["message"]


def test_a_dead_end_is_a_400_that_says_why(stack):
    response = chat(stack, guided_choice=["yes", "no"], allowed_token_ids=[100, 200])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "guided_choice"
    assert "other fields" in response.json()["error"]["message"]


def test_a_grammar_that_never_ends_hurts_nobody(stack):
    endless = {"allOf": [{"type": "string", "pattern": f"[a-z]+{index}"} for index in range(2000)]}
    known = {"guided_choice": ["London", "Paris", "Rome"], "temperature": 0}
    expected = text_of(chat(stack, **known))
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        refused = thread.submit(chat, stack, response_format=schema_format(endless))
        time.sleep(0.5)
        assert text_of(chat(stack, **known)) == expected
        assert not refused.done(), "meanwhile the others were served"
        assert refused.result().status_code == 400
        assert "takes longer than" in refused.result().json()["error"]["message"]


def test_a_stream_can_be_read_as_it_comes(stack):
    body = {
        "model": "model", "messages": [{"role": "user", "content": "Paris?"}], "stream": True, "max_tokens": 120,
        "response_format": schema_format(SCHEMA),
    }  # fmt: skip
    pieces = []
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
    assert len(pieces) > 3
    jsonschema.validate(json.loads("".join(pieces)), SCHEMA)


def test_completions_take_constraints_too(stack):
    body = {"model": "model", "prompt": ["The year is", "A date:"], "guided_regex": "[0-9]{4}", "max_tokens": 10}
    choices = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert all(re.fullmatch("[0-9]{4}", choice["text"]) for choice in choices)
    assert len(choices) == 2

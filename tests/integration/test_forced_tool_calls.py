"""Calls that a request demands, through the three processes. The demo model knows no tools: the grammar makes them."""

import json

import httpx
import jsonschema
import openai
import pytest

from tests.doubles.processes import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LAMP = {
    "type": "object",
    "properties": {"state": {"$ref": "#/$defs/state"}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["state", "level"],
    "additionalProperties": False,
    "$defs": {"state": {"enum": ["on", "off"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "set_lamp", "description": "Switch a lamp", "parameters": LAMP}},
    {"type": "function", "function": {"name": "ring"}},
]
SCHEMAS = {"set_lamp": LAMP, "ring": {"type": "object", "maxProperties": 0}}
ASK = [{"role": "user", "content": "Please switch the lamp on."}]
NAMED = {"type": "function", "function": {"name": "set_lamp"}}


@pytest.fixture(scope="module")
def stack(demo_model):
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    stack = Stack(demo_model, "--max-model-len", "1024", gateway_flags=flags)
    stack.start()
    yield stack
    assert stack.close() == {"gateway": 0, "router": 0, "worker": 0}


def chat(stack, **fields):
    body = {"model": "model", "messages": ASK, "max_tokens": 200, "tools": TOOLS, **fields}
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=120)


def calls_of(choice):
    assert choice["finish_reason"] == "tool_calls", choice
    assert choice["message"]["content"] is None
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
    return calls


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_a_named_tool_is_called(stack, temperature):
    response = chat(stack, tool_choice=NAMED, temperature=temperature, seed=1, n=3)
    assert response.status_code == 200, response.text
    for choice in response.json()["choices"]:
        assert [name for name, _ in calls_of(choice)] == ["set_lamp"]


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_any_tool_is_called_if_one_must_be(stack, temperature):
    for parallel in (True, False):
        response = chat(
            stack, tool_choice="required", parallel_tool_calls=parallel, temperature=temperature, seed=2, max_tokens=700
        )
        assert response.status_code == 200, response.text
        calls = calls_of(response.json()["choices"][0])
        assert len(calls) >= 1
        assert parallel or len(calls) == 1


def test_streamed_calls_are_those_of_the_whole_answer(stack):
    fields = {"tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
    ((name, arguments),) = calls_of(chat(stack, **fields).json()["choices"][0])
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "model", "messages": ASK, "max_tokens": 200, "tools": TOOLS}
    with client, client.chat.completions.stream(**asked, **fields) as events:
        events.until_done()
        (choice,) = events.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)


def test_a_conversation_goes_on_after_a_call(stack):
    (call,) = chat(stack, tool_choice=NAMED, temperature=0).json()["choices"][0]["message"]["tool_calls"]
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    response = chat(stack, messages=messages, temperature=0, max_tokens=30, tool_choice="none")
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


def test_a_schema_that_cannot_be_followed_names_the_tool(stack):
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/gone"}}}]
    response = chat(stack, tools=tools, tool_choice={"type": "function", "function": {"name": "f"}})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "tools.1.function.parameters"
    contradiction = {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}, "required": ["a"]}
    tools[1]["function"]["parameters"] = contradiction
    response = chat(stack, tools=tools, tool_choice={"type": "function", "function": {"name": "f"}})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "tools.1.function.parameters"


def test_a_limit_cuts_a_call_short(stack):
    (choice,) = chat(stack, tool_choice=NAMED, max_tokens=3).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "set_lamp"

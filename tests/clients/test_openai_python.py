"""OpenAI's Python client."""

import json

import pytest

from tests.clients.lamp import ASK, TOOL, City, check_state

openai = pytest.importorskip("openai", reason="pip install openai")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_chat_and_stream_say_the_same(client, server):
    fields = {"model": server[1], "messages": ASK, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**fields)
    assert whole.usage.completion_tokens <= 8
    assert whole.usage.completion_tokens_details.reasoning_tokens == 0
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_tools(client, server):
    fields = {"model": server[1], "messages": ASK, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    choice = client.chat.completions.create(**fields, parallel_tool_calls=False, temperature=0).choices[0]
    (call,) = choice.message.tool_calls
    check_state(json.loads(call.function.arguments))
    messages = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    fields = {"model": server[1], "messages": messages, "max_tokens": 4}
    assert client.chat.completions.create(**fields).choices[0].finish_reason in ("stop", "length")


def test_structured_output(client, server):
    fields = {"model": server[1], "messages": ASK, "max_tokens": 60}
    assert isinstance(client.chat.completions.parse(**fields, response_format=City).choices[0].message.parsed, City)


def test_responses(client, server):
    fields = {"model": server[1], "input": "Name a city.", "temperature": 0, "max_output_tokens": 8}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    assert events[-1].response.output_text == whole.output_text != ""


def test_models(client, server):
    assert server[1] in [model.id for model in client.models.list()]

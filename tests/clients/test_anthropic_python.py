"""Anthropic's Python client."""

import pytest

from tests.clients.lamp import ASK, LAMP, check_state

anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=server[0], api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_message_and_stream_say_the_same(client, server):
    fields = {"model": server[1], "messages": ASK, "max_tokens": 8, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text != ""
    counted = client.messages.count_tokens(model=server[1], messages=ASK).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_tools(client, server):
    tool = {"name": "set_lamp", "description": "A lamp", "input_schema": LAMP}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields = {"model": server[1], "messages": ASK, "max_tokens": 200}
    reply = client.messages.create(**fields, tools=[tool], tool_choice=choice)
    assert reply.stop_reason == "tool_use"
    check_state(reply.content[-1].input)

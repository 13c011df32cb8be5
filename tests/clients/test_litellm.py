"""LiteLLM."""

import json
import os

import pytest

from tests.clients.lamp import ASK, TOOL, City, check_state

# Else it asks the network for prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
litellm = pytest.importorskip("litellm", reason="pip install litellm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def ask(server):
    url, model = server

    def ask(**fields):
        return litellm.completion(
            f"openai/{model}", ASK, api_base=f"{url}/v1", api_key="none", num_retries=0, timeout=120, **fields
        )

    return ask


def test_chat_and_stream_say_the_same(ask):
    whole = ask(temperature=0, max_tokens=8)
    assert whole.usage.completion_tokens <= 8
    chunks = list(ask(temperature=0, max_tokens=8, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content != ""


def test_tools(ask):
    reply = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    (call,) = reply.choices[0].message.tool_calls
    check_state(json.loads(call.function.arguments))


def test_structured_output(ask):
    City.model_validate_json(ask(response_format=City, max_tokens=60).choices[0].message.content)

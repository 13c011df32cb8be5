"""LangChain's ChatOpenAI."""

import pytest

from tests.clients.lamp import ASK, TOOL, City, check_state

langchain_openai = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def chat(server):
    url, model = server
    return langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=60, max_retries=0, timeout=120
    )


def test_chat_and_stream_say_the_same(chat):
    whole = chat.invoke(ASK)
    assert whole.usage_metadata["output_tokens"] <= 60
    assert "".join(chunk.content for chunk in chat.stream(ASK)) == whole.content != ""


def test_tools(chat):
    bound = chat.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(ASK).tool_calls
    assert call["name"] == "set_lamp"
    check_state(call["args"])


def test_structured_output(chat):
    assert isinstance(chat.with_structured_output(City, method="json_schema").invoke(ASK), City)
    assert isinstance(chat.with_structured_output(City, method="function_calling").invoke(ASK), City)

"""Tools and values for models whose chat template takes them: what the gateway tells the router, by what it is told."""

import json

import httpx
import pytest

from protos import inference_pb2
from tests.integration.fake_inference import MODEL, FakeInference, running_stack

ASK = {"role": "user", "content": "Is it warm in Rome?"}
FUNCTION = {"name": "weather", "description": "Now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ROME = '{"city": "Rome"}'
TAGGED = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
HERMES = inference_pb2.ChatTemplate(takes_tools=True, tool_call_format="hermes", variables=["enable_thinking"])
HISTORY = [
    ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ROME}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "30 C"},
]


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference()) as stack:
        yield stack


@pytest.fixture(scope="module")
def hermes_stack():
    """Told by a flag how calls are written."""
    with running_stack(FakeInference(), tool_call_parser="hermes", reasoning_parser="deepseek_r1") as stack:
        yield stack


def post(stack, path="/v1/chat/completions", **fields):
    return httpx.post(f"{stack.url}{path}", json={"model": MODEL, "messages": [ASK], **fields}, timeout=20)


def sent(stack, **fields):
    """The chat that the router gets."""
    response = post(stack, **fields)
    assert response.status_code == 200, response.text
    return stack.fake.requests[-1].chat


def serve(stack, template, words=("Yes.",)):
    stack.fake.reset()
    stack.fake.chat_template, stack.fake.words = template, list(words)
    stack.fake.stop_string = "."


def test_a_template_that_takes_tools_gets_them(stack):
    serve(stack, HERMES)
    chat = sent(stack, messages=HISTORY, tools=TOOLS)
    assert [json.loads(tool) for tool in chat.tools] == TOOLS
    user, called, result = chat.messages
    assert (user.role, user.content) == ("user", ASK["content"])
    (call,) = called.tool_calls
    assert (called.role, called.content) == ("assistant", "")
    assert (call.id, call.name, call.arguments) == ("call_1", "weather", ROME)
    assert (result.role, result.content, result.tool_call_id, result.name) == ("tool", "30 C", "call_1", "weather")


def test_its_calls_are_read_in_its_own_format(stack):
    serve(stack, HERMES, [TAGGED])
    stack.fake.stop_string = ""
    (choice,) = post(stack, tools=TOOLS).json()["choices"]
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "weather", "arguments": ROME}]


@pytest.mark.parametrize(
    "template", [None, inference_pb2.ChatTemplate(), inference_pb2.ChatTemplate(takes_tools=True)], ids=str
)
def test_where_it_takes_none_or_writes_calls_in_an_unknown_way_they_are_told_in_words(stack, template):
    serve(stack, template)
    chat = sent(stack, messages=HISTORY, tools=TOOLS)
    assert not chat.tools
    assert [turn.role for turn in chat.messages] == ["user", "assistant", "user"]
    assert '"weather"' in chat.messages[0].content
    assert chat.messages[1].content == f'{{"name": "weather", "parameters": {ROME}}}'


def test_a_format_that_was_chosen_goes_with_any_template_that_takes_tools(hermes_stack):
    serve(hermes_stack, inference_pb2.ChatTemplate(takes_tools=True))
    assert len(sent(hermes_stack, tools=TOOLS).tools) == 1


def test_no_tools_are_told_when_none_may_be_called(stack):
    serve(stack, HERMES)
    chat = sent(stack, messages=HISTORY, tools=TOOLS, tool_choice="none")
    assert not chat.tools
    assert chat.messages[1].tool_calls


def test_ids_fit_the_templates_of_mistral(stack):
    serve(stack, inference_pb2.ChatTemplate(takes_tools=True, tool_call_format="mistral"))
    _, called, result = sent(stack, messages=HISTORY).messages
    assert called.tool_calls[0].id == result.tool_call_id
    assert len(result.tool_call_id) == 9
    assert result.tool_call_id.isalnum()


def test_tokenize_renders_what_a_request_would(stack):
    serve(stack, HERMES)
    body = {"messages": HISTORY, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    assert post(stack, "/tokenize", **body).status_code == 200
    assert stack.fake.calls[-1].chat == sent(stack, **body)


def test_template_kwargs_go_to_the_template(stack):
    serve(stack, HERMES)
    response = post(stack, chat_template_kwargs={"enable_thinking": False, "colour": "red"})
    given = json.loads(stack.fake.requests[-1].chat.template_kwargs)
    assert given == {"enable_thinking": False, "colour": "red"}
    assert response.headers["x-quire-ignored-fields"] == "chat_template_kwargs.colour"
    assert sent(stack).template_kwargs == ""


@pytest.mark.parametrize(
    ("variables", "effort", "given"),
    [
        (["reasoning_effort"], "low", {"reasoning_effort": "low"}),
        (["enable_thinking"], "high", {"enable_thinking": True}),
        (["enable_thinking", "thinking"], "none", {"enable_thinking": False, "thinking": False}),
        ([], "low", None),
    ],
)
def test_reasoning_effort_is_what_the_template_calls_it(stack, variables, effort, given):
    serve(stack, inference_pb2.ChatTemplate(variables=variables))
    response = post(stack, reasoning_effort=effort)
    told = stack.fake.requests[-1].chat.template_kwargs
    assert (json.loads(told) if told else None) == given
    assert response.headers.get("x-quire-ignored-fields") == (None if given else "reasoning_effort")


def test_an_explicit_value_wins_over_the_effort(stack):
    serve(stack, HERMES)
    chat = sent(stack, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert json.loads(chat.template_kwargs) == {"enable_thinking": False}


def test_without_thinking_all_is_the_answer(hermes_stack):
    serve(hermes_stack, HERMES)
    messages = [
        post(hermes_stack, **fields).json()["choices"][0]["message"]
        for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"})
    ]
    assert [message["content"] for message in messages] == ["", "Yes.", "Yes."]
    assert messages[0]["reasoning_content"] == "Yes."


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"chat_template_kwargs": []}, "chat_template_kwargs"), ({"reasoning_effort": "much"}, "reasoning_effort")],
)
def test_bad_values_are_refused(stack, fields, param):
    response = post(stack, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param

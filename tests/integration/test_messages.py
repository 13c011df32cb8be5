"""The Messages API over HTTP, before a scripted router: messages, their events, tools, errors in Anthropic's form."""

import json

import grpc
import httpx
import pytest

from gateway.messages.replies import MessagesErrorReply
from protos import inference_pb2
from protos.api_keys import ApiKey, digest_of
from tests.integration.fake_inference import MODEL, Failure, FakeInference, retry_after, running_stack

ASK = {"role": "user", "content": "Hello there"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Now", "input_schema": PARAMETERS}
ROME = {"city": "Rome"}
CALL = f'{{"name": "weather", "parameters": {json.dumps(ROME)}}}'


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference(), reasoning_parser="qwen3") as stack:
        yield stack


@pytest.fixture
def fake(stack):
    stack.fake.reset()
    return stack.fake


def post(stack, path="/v1/messages", **fields):
    body = {"model": MODEL, "max_tokens": 50, "messages": [ASK], **fields}
    return httpx.post(stack.url + path, json={k: v for k, v in body.items() if v is not None}, timeout=20)


def message(stack, **fields):
    response = post(stack, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(stack, **fields):
    """(type, payload) of all events; each is named by its type."""
    response = post(stack, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    told = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert payload["type"] == name.removeprefix("event: ")
        told.append((payload.pop("type"), payload))
    return told


def test_a_text(stack, fake):
    fake.words, fake.cached_tokens = ["Yes", ", sir"], 2
    reply = message(
        stack, system="Be brief.", temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x", "y"],
        metadata={"user_id": "ann"},
    )  # fmt: skip
    sent = fake.requests[0]
    assert [(turn.role, turn.content) for turn in sent.chat.messages] == [
        ("system", "Be brief."), ("user", "Hello there"),
    ]  # fmt: skip
    assert (sent.stopping.max_tokens, list(sent.stopping.stop), sent.sampling.top_k) == (50, ["x", "y"], 3)
    assert sent.sampling.temperature == 0.5
    assert sent.request_id == reply["id"]
    assert reply["id"].startswith("msg_")
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", MODEL)
    assert reply["content"] == [{"type": "text", "text": "Yes, sir"}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("max_tokens", None)
    assert reply["usage"] == {
        "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 2,
    }  # fmt: skip


def test_a_stop_sequence_is_told(stack, fake):
    fake.words, fake.stop_string = ["Yes"], "x"
    reply = message(stack, stop_sequences=["x"])
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "x")


def test_the_events_of_a_text(stack, fake):
    fake.words, fake.cached_tokens = ["Yes", ", ", "sir"], 1
    (start, *told) = events(stack)
    assert start[0] == "message_start"
    begun = start[1]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["input_tokens"]) == ([], None, 3)
    assert told == [
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        *[
            ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": word}})
            for word in ("Yes", ",", " sir")
        ],
        ("content_block_stop", {"index": 0}),
        (
            "message_delta",
            {
                "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
                "usage": {
                    "input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1,
                    "output_tokens": 3,
                },
            },
        ),
        ("message_stop", {}),
    ]  # fmt: skip


def test_thoughts_and_calls_are_blocks(stack, fake):
    fake.words = list(f"<think>Hm.</think>{CALL}")
    fake.stop_string = "x"
    reply = message(stack, tools=[WEATHER])
    thought, call = reply["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", ROME)
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("tool_use", None)
    told = events(stack, tools=[WEATHER])
    assert [payload["content_block"]["type"] for kind, payload in told if kind == "content_block_start"] == [
        "thinking", "tool_use",
    ]  # fmt: skip
    arguments = [payload["delta"].get("partial_json", "") for kind, payload in told if kind == "content_block_delta"]
    assert json.loads("".join(arguments)) == ROME
    assert told[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert json.dumps(PARAMETERS) in fake.requests[0].chat.messages[0].content


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "weather"}, {"type": "any"}])
def test_demanded_calls_are_grammars(stack, fake, choice):
    fake.words = [json.dumps(ROME) if choice["type"] == "tool" else f"[{CALL}]"]
    reply = message(stack, tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert [block["input"] for block in reply["content"]] == [ROME]
    schema = json.loads(fake.requests[0].sampling.json_schema)
    assert schema == PARAMETERS or schema["maxItems"] == 1


def test_calls_and_results_go_to_the_template(stack, fake):
    fake.chat_template = inference_pb2.ChatTemplate(takes_tools=True, tool_call_format="hermes")
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": ROME}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "30 C"}]}
    conversation = [
        ASK,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
                                          {"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    message(stack, messages=conversation, tools=[WEATHER])
    _, called, returned, asked = fake.requests[0].chat.messages
    assert (called.content, called.tool_calls[0].id) == ("I look.", "toolu_1")
    assert json.loads(called.tool_calls[0].arguments) == ROME
    assert (returned.role, returned.content, returned.tool_call_id) == ("tool", "30 C", "toolu_1")
    assert (asked.role, asked.content) == ("user", "Well?")


def test_thinking_can_be_turned_off(stack, fake):
    fake.chat_template = inference_pb2.ChatTemplate(variables=["enable_thinking"])
    message(stack, thinking={"type": "disabled"})
    assert json.loads(fake.requests[0].chat.template_kwargs) == {"enable_thinking": False}


def test_thinking_that_no_template_turns_off_is_named_as_ignored(stack, fake):
    response = post(stack, thinking={"type": "disabled"})
    assert response.headers["x-quire-ignored-fields"] == "thinking"
    assert post(stack, output_config={"effort": "low"}).headers["x-quire-ignored-fields"] == "output_config.effort"


def test_a_schema_is_a_grammar(stack, fake):
    fake.words = ['"red"']
    schema = {"enum": ["red"]}
    message(stack, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(fake.requests[0].sampling.json_schema) == schema


def test_tokens_are_counted_as_they_would_be_sent(stack, fake):
    fields = {"system": "Be brief.", "tools": [WEATHER]}
    response = post(stack, "/v1/messages/count_tokens", **fields)
    message(stack, **fields)
    assert fake.calls[0].chat == fake.requests[0].chat
    told = "".join(turn.content for turn in fake.requests[0].chat.messages)
    assert response.json() == {"input_tokens": len(told.encode())}


def test_what_has_no_effect_is_named(stack, fake):
    response = post(
        stack, thinking={"type": "enabled", "budget_tokens": 9}, service_tier="auto", container="c",
        output_config={"effort": "max"}, tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}}],
    )  # fmt: skip
    assert set(response.headers["x-quire-ignored-fields"].split(", ")) == {
        "thinking.budget_tokens", "service_tier", "container", "output_config.effort", "tools.cache_control",
    }  # fmt: skip


def error_of(response, status, kind):
    assert response.status_code == status, response.text
    error = MessagesErrorReply.model_validate_json(response.content, strict=True).error
    assert error.type == kind
    return error.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [ASK, {"role": "assistant", "content": "I"}]}, "the last message must be the user's"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages.0.content.0"),
        ({"system": [{"type": "x"}]}, "system.0.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "y"}]}]},
            "messages.0.content.0.tool_use_id",
        ),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "no tool is named x"),
        ({"n": 2}, "n is a field of chat completions"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format.schema",
        ),
    ],
)
def test_what_is_wrong_is_named(stack, fake, fields, named):
    assert named in error_of(post(stack, **fields), 400, "invalid_request_error")
    assert fake.requests == []


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (retry_after(3),)), 429, "rate_limit_error"),
        (Failure(grpc.StatusCode.UNAVAILABLE, "none"), 503, "overloaded_error"),
        (Failure(grpc.StatusCode.INTERNAL, "broken"), 500, "api_error"),
        (Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "late"), 504, "timeout_error"),
    ],
)
def test_failures_have_anthropics_types(stack, fake, failure, status, kind):
    fake.refusal = failure
    error_of(post(stack), status, kind)


def test_other_refusals_have_the_form_too(stack, fake):
    error_of(post(stack, model="no such model"), 404, "not_found_error")
    error_of(httpx.get(f"{stack.url}/v1/messages"), 405, "invalid_request_error")
    error_of(httpx.post(f"{stack.url}/v1/messages", content=b"{", headers={"content-type": "application/json"}), 400,
             "invalid_request_error")  # fmt: skip
    # Other paths keep OpenAI's.
    assert httpx.get(f"{stack.url}/v1/messages-of-others").json()["error"]["type"] == "invalid_request_error"


def test_a_key_in_anthropics_header():
    with running_stack(FakeInference(), api_keys=(ApiKey(digest_of("secret")),)) as stack:
        error_of(post(stack), 401, "authentication_error")
        url, body = f"{stack.url}/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": [ASK]}
        assert httpx.post(url, json=body, headers={"x-api-key": "secret"}).status_code == 200


def test_a_stream_that_breaks_says_so(stack, fake):
    fake.failure_after_tokens = (2, Failure(grpc.StatusCode.UNAVAILABLE, "gone"))
    told = events(stack)
    assert told[-1][0] == "error"
    assert told[-1][1]["error"]["type"] == "overloaded_error"
    assert not any(kind == "message_stop" for kind, _ in told)

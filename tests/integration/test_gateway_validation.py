"""What the gateway refuses before it asks the router, over HTTP: bodies, fields, and what is not supported yet."""

import json
import socket

import httpx
import pytest

from gateway.replies import ErrorReply
from gateway.request_limits import RequestLimits
from gateway.schema import MAX_PROMPTS
from tests.integration.fake_inference import MODEL, FakeInference, running_stack

HELLO = [{"role": "user", "content": "Hello there"}]
CHAT = {"model": MODEL, "messages": HELLO}
TEXT = {"model": MODEL, "prompt": "Hello there"}


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference(), limits=RequestLimits(max_body_bytes=200_000, body_timeout=1)) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack):
    with httpx.Client(base_url=stack.url, timeout=20) as client:
        yield client


@pytest.fixture
def fake(stack):
    stack.fake.reset()
    return stack.fake


def chat(client, **fields):
    return client.post("/v1/chat/completions", json={**CHAT, **fields})


def complete(client, **fields):
    return client.post("/v1/completions", json={**TEXT, **fields})


def error_of(response, status):
    """The error object of an answer, after checking all that every error has."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return ErrorReply.model_validate_json(response.content, strict=True).error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"nope", b"[1, 2]", b'"text"', b"null", b"{}", b"\xff", b'{"model": NaN}', b"[" * 50_000, b"7" * 9999],
    ids=["empty", "cut", "word", "array", "string", "null", "no-fields", "bytes", "nan", "deep", "long-number"],
)
def test_bodies_that_are_no_request(client, path, data):
    error = error_of(client.post(path, content=data, headers={"content-type": "application/json"}), 400)
    assert error.type == "invalid_request_error"


@pytest.mark.parametrize("media_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_media_types_other_than_json(client, media_type):
    headers = {} if media_type is None else {"content-type": media_type}
    error_of(client.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers), 415)


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 200)])
def test_bodies_are_not_compressed(client, encoding, status):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = client.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers)
    assert response.status_code == status
    assert status == 200 or encoding in response.json()["error"]["message"]


def test_a_body_that_does_not_come(client, fake):
    host, port = client.base_url.host, client.base_url.port
    with socket.create_connection((host, port), timeout=10) as connection:
        head = (
            "POST /v1/completions HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            "Content-Length: 9",
            "",
            "",
        )
        connection.sendall("\r\n".join(head).encode() + b"{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_media_type_may_have_parameters(client, fake):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers).status_code == 200


@pytest.mark.parametrize("announced", [True, False])
def test_bodies_over_the_limit(client, fake, announced):
    def body(length):
        data = json.dumps(CHAT).encode()
        data += b" " * (length - len(data))
        return data if announced else iter([data[: length // 2], data[length // 2 :]])

    headers = {"content-type": "application/json"}
    assert client.post("/v1/chat/completions", content=body(200_000), headers=headers).status_code == 200
    error = error_of(client.post("/v1/chat/completions", content=body(200_001), headers=headers), 413)
    assert "200000 bytes" in error.message
    assert len(fake.requests) == 1


BAD_FIELDS = [
    ("messages", [], "messages"),
    ("messages", None, "messages"),
    ("messages", "hello", "messages"),
    ("messages", ["hello"], "messages.0"),
    ("messages", [{"content": "x"}], "messages.0.role"),
    ("messages", [{"role": "user"}], "messages.0.content"),
    ("messages", [{"role": "user", "content": None}], "messages.0.content"),
    ("messages", [{"role": "user", "content": 5}], "messages.0.content"),
    ("messages", [{"role": "user", "content": []}], "messages.0.content"),
    ("messages", [{"role": "user", "content": ["x"]}], "messages.0.content.0"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
    ("messages", [{"role": "user", "content": "x", "name": 5}], "messages.0.name"),
    ("messages", [{"role": "wizard", "content": "x"}], "messages.0.role"),
    ("model", 5, "model"),
    ("model", "", "model"),
    ("model", None, "model"),
    ("temperature", "hot", "temperature"),
    ("temperature", True, "temperature"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.01, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", "5", "max_tokens"),
    ("max_tokens", 2.5, "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_tokens", 2**32, "max_tokens"),
    ("max_completion_tokens", -1, "max_completion_tokens"),
    ("n", 0, "n"),
    ("n", 9, "n"),
    ("n", 1.5, "n"),
    ("stop", 5, "stop"),
    ("stop", "", "stop"),
    ("stop", "x" * 257, "stop"),
    ("stop", ["ok", 2], "stop.1"),
    ("stop", ["ok", ""], "stop.1"),
    ("stop", ["s"] * 17, "stop"),
    ("seed", "x", "seed"),
    ("seed", 2**64, "seed"),
    ("stream", "perhaps", "stream"),
    ("stream", 1, "stream"),
    ("stream_options", True, "stream_options"),
    ("stream_options", {"include_usage": "yes"}, "stream_options.include_usage"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("top_k", -2, "top_k"),
    ("min_p", 1.5, "min_p"),
    ("stop_token_ids", [-1], "stop_token_ids.0"),
    ("stop_token_ids", 7, "stop_token_ids"),
    ("ignore_eos", "no", "ignore_eos"),
    ("cache_salt", "", "cache_salt"),
    ("add_generation_prompt", 1, "add_generation_prompt"),
    ("top_logprobs", 2, "top_logprobs"),
    ("logit_bias", [1], "logit_bias"),
    ("logit_bias", {"word": 1}, "logit_bias.word"),
    ("logit_bias", {"-1": 1}, "logit_bias.-1"),
    ("logit_bias", {str(token): 0 for token in range(1025)}, "logit_bias"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("repetition_penalty", 2.5, "repetition_penalty"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", ["a"], "allowed_token_ids.0"),
    ("bad_words", [""], "bad_words.0"),
    ("bad_words", ["a"] * 65, "bad_words"),
    ("logit_bias", {"10": "x"}, "logit_bias.10"),
    ("response_format", "json", "response_format"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
    ("structured_outputs", {"json": 1}, "structured_outputs.json"),
    ("structured_outputs", {"regex": ["a"]}, "structured_outputs.regex"),
    ("structured_outputs", {"structural_tag": "a"}, "structured_outputs.structural_tag"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs.choice"),
    ("guided_choice", "a", "guided_choice"),
    ("guided_json", 5, "guided_json"),
    ("tools", "none", "tools"),
    ("tool_choice", [1], "tool_choice"),
    ("presence_penalty", "a", "presence_penalty"),
    ("frequency_penalty", -2.5, "frequency_penalty"),
]


@pytest.mark.parametrize(("field", "value", "param"), BAD_FIELDS)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields_of_chat(client, fake, field, value, param, stream):
    body = {"stream": stream, **CHAT, field: value}
    if (field, param) == ("stream_options", "stream_options"):
        body["stream"] = False
    error = error_of(client.post("/v1/chat/completions", json=body), 400)
    assert (error.type, error.param) == ("invalid_request_error", param)
    assert param in error.message
    assert fake.requests == []


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([], "prompt"),
        ([[]], "prompt.0"),
        ([-1], "prompt.0"),
        ([2**32], "prompt.0"),
        ([True], "prompt.0"),
        ([1.5], "prompt"),
        (["a", 5], "prompt.1"),
        ([1, "a"], "prompt.1"),
        ([[1], ["a"]], "prompt.1.0"),
        ([[1], 2], "prompt.1"),
        ([[1], []], "prompt.1"),
        (["x"] * (MAX_PROMPTS + 1), "prompt"),
    ],
)
def test_bad_prompts(client, fake, prompt, param):
    assert error_of(complete(client, prompt=prompt), 400).param == param
    assert fake.requests == []


def test_missing_prompt(client):
    assert error_of(client.post("/v1/completions", json={"model": MODEL}), 400).param == "prompt"


# What would change the result and is not built yet.
UNSUPPORTED = [
    ("detokenize", False),
    ("return_token_ids", True),
    ("return_tokens_as_token_ids", True),
    ("skip_special_tokens", False),
    ("spaces_between_special_tokens", False),
    ("guided_whitespace_pattern", " "),
    ("prompt_logprobs", 1),
    ("truncate_prompt_tokens", 5),
    ("use_beam_search", True),
]
UNSUPPORTED_CHAT = [
    *UNSUPPORTED,
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "a"}),
    ("continue_final_message", True),
    ("chat_template", "{{ x }}"),
]
UNSUPPORTED_COMPLETION = [
    *UNSUPPORTED, ("suffix", "end"), ("best_of", 2),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED_CHAT)
def test_unsupported_fields_of_chat_are_refused(client, fake, field, value):
    error = error_of(chat(client, **{field: value}), 400)
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert fake.requests == []


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED_COMPLETION)
def test_unsupported_fields_of_completions_are_refused(client, fake, field, value):
    error = error_of(complete(client, **{field: value}), 400)
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert fake.requests == []


def test_who_wants_a_suffix_is_told_what_to_do(client, fake):
    message = error_of(complete(client, suffix="end"), 400).message
    assert "token ids" in message
    assert "chat" in message


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages.1.tool_call_id"),
        ({"role": "tool", "tool_call_id": "c1"}, "messages.1.content"),
        ({"role": "tool", "tool_call_id": "c2", "content": "x"}, "messages.1.tool_call_id"),
        ({"role": "assistant"}, "messages.1.content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.1.tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "x"}}]},
            "messages.1.tool_calls.0.function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages.1.tool_calls.0.type"),
        ({"role": "function", "content": "x"}, "messages.1.role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages.1.content.0.type"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages.1.tool_calls.0.id"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}, "messages.1.content.0.refusal"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "messages.1.content"),
    ],
)
def test_unsupported_messages_are_refused(client, fake, message, param):
    assert error_of(chat(client, messages=[*HELLO, message]), 400).param == param
    assert fake.requests == []


def test_a_refusal_in_the_history_is_what_the_assistant_said(client, fake):
    refusal = [{"type": "text", "text": "Hm. "}, {"type": "refusal", "refusal": "No."}]
    messages = [*HELLO, {"role": "assistant", "content": refusal}, {"role": "user", "content": "Please."}]
    assert chat(client, messages=messages).status_code == 200
    assert fake.requests[0].chat.messages[1].content == "Hm. No."


def test_harmless_values_and_fields_without_effect_are_accepted(client, fake):
    harmless = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "min_tokens": 0,
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "logprobs": False, "top_logprobs": 0,
    }  # fmt: skip
    response = chat(client, **harmless)
    assert response.status_code == 200
    assert "x-quire-ignored-fields" not in response.headers
    ignored = {
        "metadata": {"a": "b"}, "store": False,
        "safety_identifier": "s", "x_invented": {"a": 1}, "web_search_options": {}, "prediction": {"type": "content"},
        "verbosity": "low",
    }  # fmt: skip
    response = chat(client, **ignored, moderation=None, **{"bad\r\nname": 1})
    assert response.status_code == 200
    assert response.headers["x-quire-ignored-fields"] == ", ".join(ignored)
    assert complete(client, best_of=2, n=2, echo=False, suffix="").status_code == 200
    cached = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "examples": []}
    response = chat(
        client,
        messages=[{"role": "user", "content": [cached, cached], "weight": 1, "refusal": None}] * 2,
        tools=[{"type": "function", "function": function, "x": 1}],
        response_format={"type": "text", "y": 1},
        tool_choice="none",
    )
    assert set(response.headers["x-quire-ignored-fields"].split(", ")) == {
        "messages.weight", "messages.content.cache_control", "tools.x", "tools.function.examples", "response_format.y",
    }  # fmt: skip
    stream = chat(client, stream=True, stream_options={"include_usage": False, "include_obfuscation": False})
    assert stream.headers["x-quire-ignored-fields"] == "stream_options.include_obfuscation"

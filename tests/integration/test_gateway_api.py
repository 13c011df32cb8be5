"""The gateway's endpoints over HTTP, before a scripted router: shapes, validation, refusals, errors."""

import json
import logging

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2

from gateway.replies import ChatCompletion, Completion, ErrorReply
from gateway.schema import MAX_PROMPTS
from protos import inference_pb2, sampling_pb2
from tests.integration.fake_inference import (
    MAX_MODEL_LEN,
    MODEL,
    Failure,
    FakeInference,
    bad_request,
    retry_after,
    running_stack,
)

HELLO = [{"role": "user", "content": "Hello there"}]
CHAT = {"model": MODEL, "messages": HELLO}
TEXT = {"model": MODEL, "prompt": "Hello there"}


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference(), max_body_bytes=200_000) as stack:
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


def test_chat_reply(client, fake):
    fake.cached_tokens = 1
    response = chat(client, max_tokens=3, n=2)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    reply = ChatCompletion.model_validate_json(response.content, strict=True)
    assert reply.id.startswith("chatcmpl-")
    assert reply.id == fake.requests[0].request_id
    assert reply.model == MODEL
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert {choice.message.content for choice in reply.choices} == {"w0 w1 w2 "}
    assert {choice.finish_reason for choice in reply.choices} == {"length"}
    assert reply.usage.model_dump() == {
        "prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert fake.requests[0].output.final_only


def test_text_reply_of_several_prompts(client, fake):
    response = complete(client, prompt=["a b c", "d"], n=2, max_tokens=2)
    reply = Completion.model_validate_json(response.content, strict=True)
    assert reply.id.startswith("cmpl-")
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in reply.choices} == {"w0 w1 "}
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 8)
    assert sorted(request.text for request in fake.requests) == ["a b c", "d"]
    assert sorted(request.request_id for request in fake.requests) == [f"{reply.id}-0", f"{reply.id}-1"]


def test_stop_reason_is_what_was_met(client, fake):
    fake.stop_string = "END"
    choice = chat(client).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


def test_call_gets_the_request_timeout(client, fake):
    chat(client)
    assert 590 < fake.time_left[0] < 610


def test_models(client, fake):
    model = {
        "id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "quire", "max_model_len": MAX_MODEL_LEN,
    }  # fmt: skip
    assert client.get("/v1/models").json() == {"object": "list", "data": [model]}
    assert client.get(f"/v1/models/{MODEL}").json() == model
    error = error_of(client.get("/v1/models/other"), 404)
    assert (error.code, error.param) == ("model_not_found", "model")
    assert "other" in error.message


def test_tokenize_and_back(client, fake):
    reply = client.post("/tokenize", json={"model": MODEL, "prompt": "ab", "add_special_tokens": False}).json()
    assert reply == {"count": 2, "max_model_len": MAX_MODEL_LEN, "tokens": [97, 98], "token_strs": None}
    assert client.post("/tokenize", json={"model": MODEL, "messages": HELLO}).json()["count"] == len("Hello there")
    assert client.post("/detokenize", json={"model": MODEL, "tokens": [97, 98]}).json() == {"prompt": "ab"}
    fake.refusal = Failure(grpc.StatusCode.INVALID_ARGUMENT, "no such id", (bad_request("token_ids[1]"),))
    error = error_of(client.post("/detokenize", json={"model": MODEL, "tokens": [97, 9999]}), 400)
    assert (error.param, error.message) == ("tokens.1", "no such id")
    tool = [{"role": "assistant", "content": "", "tool_calls": [{}]}]
    assert error_of(client.post("/tokenize", json={"model": MODEL, "messages": tool}), 400).param == (
        "messages.0.tool_calls"
    )


def test_health_follows_the_router(stack, client):
    assert client.get("/health").status_code == 200
    stack.set_serving(False)
    try:
        assert error_of(client.get("/health"), 503).type == "server_error"
        assert client.get("/livez").status_code == 200
    finally:
        stack.set_serving(True)
    assert client.get("/health").status_code == 200


def test_version(client):
    assert isinstance(client.get("/version").json()["version"], str)


def test_metrics_count_what_happened(client, fake):
    def samples():
        response = client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        lines = [line for line in response.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = samples()
    chat(client, max_tokens=3, n=2)
    chat(client, max_tokens=3, stream=True)
    chat(client, temperature=9)
    after = samples()

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown("quire_prompt_tokens_total") == 6
    assert grown("quire_generation_tokens_total") == 9
    assert grown('quire_request_success_total{finished_reason="length"}') == 3
    assert grown("quire_e2e_request_latency_seconds_count") == 2
    assert grown("quire_time_to_first_token_seconds_count") == 1
    assert grown("quire_inter_token_latency_seconds_count") == 2
    assert grown('quire_http_requests_total{route="/v1/chat/completions",status="200"}') == 2
    assert grown('quire_http_requests_total{route="/v1/chat/completions",status="400"}') == 1
    assert after["quire_num_requests_running"] == 0


def test_a_request_id_is_echoed_or_made(client, fake):
    assert client.get("/livez", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("x" * 129, "with space", "quote\"'", "ünïcode".encode("latin-1")):
        assert len(client.get("/livez", headers={"x-request-id": bad}).headers["x-request-id"]) == 32


def test_a_request_id_is_logged(client, fake, caplog):
    with caplog.at_level(logging.INFO, logger="gateway"):
        reply = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "find-me"}).json()
    (line,) = [record.getMessage() for record in caplog.records if "find-me" in record.getMessage()]
    assert reply["id"] in line
    assert " 200 " in line


def test_openapi_tells_of_every_endpoint(client):
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
        "/health", "/livez", "/version", "/metrics",
    }  # fmt: skip
    schemas = document["components"]["schemas"]
    references = {
        word.removeprefix("#/components/schemas/")
        for word in json.dumps(document).split('"')
        if word.startswith("#/components/schemas/")
    }
    assert references <= set(schemas)
    assert {"ChatCompletionChunk", "CompletionChunk"} <= references
    operation = document["paths"]["/v1/chat/completions"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatBody")
    assert "422" not in json.dumps(document)


def test_wrong_path_and_method(client):
    assert "/nope" in error_of(client.get("/nope"), 404).message
    response = client.get("/v1/chat/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


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
    ("logit_bias", [1], "logit_bias"),
    ("logit_bias", {"10": "x"}, "logit_bias.10"),
    ("response_format", "json", "response_format"),
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
    ("logit_bias", {"5": 1}),
    ("presence_penalty", 0.5),
    ("frequency_penalty", -0.5),
    ("repetition_penalty", 1.1),
    ("min_tokens", 2),
    ("response_format", {"type": "json_object"}),
    ("structured_outputs", {"regex": "a"}),
    ("guided_json", {}),
    ("guided_regex", "a"),
    ("guided_choice", ["a"]),
    ("guided_grammar", "root"),
    ("prompt_logprobs", 1),
    ("bad_words", ["a"]),
    ("allowed_token_ids", [1]),
    ("truncate_prompt_tokens", 5),
    ("use_beam_search", True),
]
UNSUPPORTED_CHAT = [
    *UNSUPPORTED,
    ("logprobs", True),
    ("top_logprobs", 2),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function"}),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "a"}),
    ("continue_final_message", True),
    ("chat_template", "{{ x }}"),
    ("chat_template_kwargs", {"a": 1}),
]
UNSUPPORTED_COMPLETION = [
    *UNSUPPORTED, ("logprobs", 0), ("suffix", "end"), ("echo", True), ("best_of", 2),
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


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages.1.role"),
        ({"role": "function", "content": "x"}, "messages.1.role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages.1.content.0.type"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages.1.tool_calls"),
    ],
)
def test_unsupported_messages_are_refused(client, fake, message, param):
    assert error_of(chat(client, messages=[*HELLO, message]), 400).param == param
    assert fake.requests == []


def test_harmless_values_and_fields_without_effect_are_accepted(client, fake):
    harmless = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "min_tokens": 0,
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "logprobs": False, "top_logprobs": 0,
    }  # fmt: skip
    response = chat(client, **harmless)
    assert response.status_code == 200
    assert "x-quire-ignored-fields" not in response.headers
    ignored = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
        "safety_identifier": "s", "prompt_cache_key": "k", "x_invented": {"a": 1},
    }  # fmt: skip
    response = chat(client, **ignored, verbosity=None, **{"bad\r\nname": 1})
    assert response.status_code == 200
    assert response.headers["x-quire-ignored-fields"] == ", ".join(ignored)
    assert complete(client, best_of=2, n=2, echo=False, suffix="").status_code == 200
    stream = chat(client, stream=True, stream_options={"include_usage": False, "include_obfuscation": False})
    assert stream.headers["x-quire-ignored-fields"] == "stream_options.include_obfuscation"


ROUTER_ERRORS = [
    (Failure(grpc.StatusCode.INVALID_ARGUMENT, "too many", (bad_request("stopping.max_tokens"),)), 400, None),
    (Failure(grpc.StatusCode.NOT_FOUND, "gone"), 404, None),
    (Failure(grpc.StatusCode.ALREADY_EXISTS, "twice"), 409, None),
    (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full", (retry_after(2.5),)), 429, "3"),
    (Failure(grpc.StatusCode.CANCELLED, "cancelled"), 499, None),
    (Failure(grpc.StatusCode.UNAVAILABLE, "no worker", (retry_after(7),)), 503, "7"),
    (Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "late"), 504, None),
    (Failure(grpc.StatusCode.INTERNAL, "SECRET"), 500, None),
    (Failure(grpc.StatusCode.UNKNOWN, "SECRET"), 500, None),
]


@pytest.mark.parametrize(("failure", "status", "retry"), ROUTER_ERRORS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["one", ["one", "two"]], ids=["single", "batch"])
def test_errors_of_the_router_have_a_real_status(client, fake, failure, status, retry, stream, prompt):
    fake.refusal = failure
    response = complete(client, prompt=prompt, stream=stream, max_tokens=5)
    error = error_of(response, status)
    assert response.headers.get("retry-after") == retry
    assert "SECRET" not in response.text
    assert failure.message in error.message or status == 500


def test_the_field_is_named_as_the_client_wrote_it(client, fake):
    details = (bad_request("stopping.max_tokens"), error_details_pb2.ErrorInfo(reason="CONTEXT_LENGTH_EXCEEDED"))
    fake.refusal = Failure(grpc.StatusCode.INVALID_ARGUMENT, "context is 2048 tokens", details)
    error = error_of(chat(client, max_completion_tokens=5000), 400)
    assert (error.param, error.code) == ("max_completion_tokens", "context_length_exceeded")
    assert error.message == "context is 2048 tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(client, fake, stream):
    error = error_of(chat(client, model="other", stream=stream), 404)
    assert (error.code, error.param) == ("model_not_found", "model")
    assert "other" in error.message


def started():
    return inference_pb2.GenerateResponse(started=inference_pb2.Started(prompt_tokens=1))


def delta(index):
    return inference_pb2.GenerateResponse(delta=inference_pb2.Delta(index=index, text="x"))


def finished(index, reason=sampling_pb2.FINISH_REASON_STOP):
    return inference_pb2.GenerateResponse(finished=inference_pb2.Finished(index=index, reason=reason))


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ([], 500),
        ([delta(0)], 500),
        ([started()], 500),
        ([started(), started()], 500),
        ([started(), delta(1), finished(0)], 500),
        ([started(), finished(0), delta(0)], 500),
        ([started(), finished(0), finished(0)], 500),
        ([started(), inference_pb2.GenerateResponse(), finished(0)], 500),
        ([started(), finished(0, sampling_pb2.FINISH_REASON_ERROR)], 500),
        ([started(), finished(0, sampling_pb2.FINISH_REASON_DEADLINE)], 504),
        ([started(), finished(0, sampling_pb2.FINISH_REASON_CANCELLED)], 499),
    ],
)
def test_a_reply_that_is_not_complete_is_never_passed_off_as_one(client, fake, script, status):
    fake.script = script
    error_of(chat(client), status)
    fake.script = [started(), delta(0), finished(0)]
    assert chat(client).json()["choices"][0]["message"]["content"] == "x"


def test_cors_is_off_unless_asked_for(client):
    assert "access-control-allow-origin" not in client.get("/livez", headers={"origin": "https://a.example"}).headers
    with (
        running_stack(FakeInference(), enable_cors_origins=("https://a.example",)) as stack,
        httpx.Client(base_url=stack.url) as other,
    ):
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        allowed = other.options("/v1/chat/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        stranger = other.get("/livez", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in stranger.headers

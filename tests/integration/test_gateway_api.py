"""The gateway's endpoints over HTTP, before a scripted router: shapes, validation, refusals, errors."""

import json
import logging

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2

from gateway.replies import ChatCompletion, Completion, ErrorReply
from protos import inference_pb2, sampling_pb2
from tests.doubles.processes import wait_until
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
    with running_stack(FakeInference()) as stack:
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
        "completion_tokens_details": {"reasoning_tokens": 0},
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
        "messages.0.tool_calls.0.id"
    )


@pytest.mark.parametrize("path", ["/health", "/readyz"])
def test_health_follows_the_router(stack, client, path):
    assert client.get(path).status_code == 200
    stack.set_serving(False)
    try:
        assert error_of(client.get(path), 503).type == "server_error"
        assert client.get("/livez").status_code == 200
    finally:
        stack.set_serving(True)
    assert client.get(path).status_code == 200


def test_a_draining_gateway_takes_no_new_requests():
    with running_stack(FakeInference()) as stack, httpx.Client(base_url=stack.url) as client:
        assert chat(client).status_code == 200
        stack.app.state.upstream.drain()
        error_of(client.get("/health"), 503)
        assert chat(client).headers["retry-after"] == "1"
        assert client.get("/livez").status_code == 200


def test_our_own_mistakes_are_a_500_with_an_id_that_the_log_has(stack, client, monkeypatch, caplog):
    async def broken(self):
        raise RuntimeError("SECRET")

    monkeypatch.setattr(type(stack.app.state.upstream), "list_models", broken)
    response = client.get("/v1/models")
    error = error_of(response, 500)
    assert "SECRET" not in response.text
    assert error.message.split()[2].rstrip(".") in caplog.text
    assert "SECRET" in caplog.text


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
    assert after["quire_router_up"] == 1
    assert after["quire_router_num_requests_waiting"] == 3
    assert grown('quire_http_requests_total{route="/v1/chat/completions",status="200"}') == 2
    assert grown('quire_http_requests_total{route="/v1/chat/completions",status="400"}') == 1
    assert after["quire_num_requests_running"] == 0


def test_metrics_say_when_the_router_does_not_answer(client, fake):
    fake.refusal = Failure(grpc.StatusCode.UNAVAILABLE)
    response = client.get("/metrics")
    assert response.status_code == 200
    assert "\nquire_router_up 0\n" in response.text
    assert "\nquire_num_requests_running " in response.text
    assert "quire_router_num_requests_waiting" not in response.text


def test_a_request_id_is_echoed_or_made(client, fake):
    assert client.get("/livez", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("x" * 129, "with space", "quote\"'", "ünïcode".encode("latin-1")):
        assert len(client.get("/livez", headers={"x-request-id": bad}).headers["x-request-id"]) == 32


def test_a_request_id_is_logged(client, fake, caplog):
    lines: list[str] = []

    def logged() -> bool:  # it may come after the answer
        lines[:] = [record.getMessage() for record in caplog.records if "find-me" in record.getMessage()]
        return bool(lines)

    with caplog.at_level(logging.INFO, logger="gateway"):
        reply = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "find-me"}).json()
        wait_until(logged)
    (line,) = lines
    assert reply["id"] in line
    assert " 200 " in line


def test_openapi_tells_of_every_endpoint(client):
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses",
        "/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
        "/health", "/readyz", "/livez", "/load", "/fleet", "/version", "/metrics",
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


@pytest.mark.parametrize(("prompt", "param"), [([7, 8], "prompt.1"), ([[7], [8, 9]], "prompt.0.1")])
def test_a_bad_token_is_named_by_its_place_in_the_body(client, fake, prompt, param):
    fake.refusal = Failure(grpc.StatusCode.INVALID_ARGUMENT, "no such id", (bad_request("token_ids.ids[1]"),))
    answer = client.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


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
    return inference_pb2.GenerateEvent(started=inference_pb2.Started(prompt_tokens=1))


def delta(index):
    return inference_pb2.GenerateEvent(delta=inference_pb2.Delta(index=index, text="x"))


def finished(index, reason=sampling_pb2.FINISH_REASON_STOP):
    return inference_pb2.GenerateEvent(finished=inference_pb2.Finished(index=index, reason=reason))


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
        ([started(), inference_pb2.GenerateEvent(), finished(0)], 500),
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
        running_stack(FakeInference(), allowed_origins=("https://a.example",)) as stack,
        httpx.Client(base_url=stack.url) as other,
    ):
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        allowed = other.options("/v1/chat/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        stranger = other.get("/livez", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_answers_say_how_they_came_to_their_worker(client, fake):
    fake.route = inference_pb2.Route(worker="w1", reason="prefix", cached_tokens=32, queue_ms=5)
    fake.route_at_end = (("x-quire-worker", "w2"), ("x-quire-prefill-ms", "7"), ("x-other", "1"))
    whole = chat(client)
    assert (whole.headers["x-quire-worker"], whole.headers["x-quire-cached-tokens"]) == ("w2", "32")
    assert whole.headers["x-quire-prefill-ms"] == "7"
    assert "x-other" not in whole.headers
    stream = complete(client, stream=True)
    assert {name: value for name, value in stream.headers.items() if name.startswith("x-quire-")} == {
        "x-quire-worker": "w1", "x-quire-reason": "prefix", "x-quire-predicted-cached-tokens": "0",
        "x-quire-cached-tokens": "32", "x-quire-queue-ms": "5",
    }  # fmt: skip
    assert "x-quire-prefill-ms" not in stream.headers, "it was not known when the headers were sent"


def test_tenants_are_told_apart_by_key_and_user_and_neither_goes_on(client, fake):
    def tenant(headers=None, **fields) -> str:
        assert client.post("/v1/chat/completions", json={**CHAT, **fields}, headers=headers or {}).status_code == 200
        return fake.requests[-1].tenant

    key = {"authorization": "Bearer sk-secret"}
    tenants = [tenant(), tenant(key), tenant(user="ann"), tenant(key, user="ann"), tenant(key, user="ünïcode")]
    assert tenants[0] == ""
    assert len(set(tenants)) == 5
    assert tenant(key) == tenants[1]
    assert not any("secret" in name or "ann" in name for name in tenants)
    accounts = [name.partition("/")[0] for name in tenants]
    assert accounts == [tenants[0], tenants[1], "", tenants[1], tenants[1]], "users are an account's"


def test_sessions_come_from_a_header_or_the_cache_key(client, fake):
    def session(headers=None, **fields) -> str:
        assert client.post("/v1/completions", json={**TEXT, **fields}, headers=headers or {}).status_code == 200
        return fake.requests[-1].session_id

    assert session() == ""
    assert session(prompt_cache_key="chat-1") == session({"x-quire-session": "chat-1"})
    assert session({"x-quire-session": "chat-2"}, prompt_cache_key="chat-1") == session(prompt_cache_key="chat-2")


def test_load_is_what_runs_now(stack, client, fake):
    def running():
        response = client.get("/load")
        assert response.status_code == 200
        assert response.json().keys() == {"server_load"}
        return response.json()["server_load"]

    assert running() == 0
    fake.delay_token = 0.05
    body = {**CHAT, "stream": True, "max_tokens": 200}
    with client.stream("POST", "/v1/chat/completions", json=body), httpx.Client(base_url=stack.url) as other:
        assert other.get("/load").json() == {"server_load": 1}
    wait_until(lambda: running() == 0)

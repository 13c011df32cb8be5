"""What a stream looks like, how it fails, and what the official client makes of it."""

import json
import threading

import grpc
import httpx
import openai
import pytest

from gateway import stream as stream_module
from gateway.replies import ChatCompletionChunk, CompletionChunk, ErrorReply
from protos import inference_pb2
from tests.integration.fake_inference import MODEL, Failure, FakeInference, retry_after, running_stack

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello there"}], "stream": True}
TEXT = {"model": MODEL, "prompt": "Hello there", "stream": True}


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


def events_of(response):
    """The data of all events; comments are left out."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.text.endswith("\n\n")
    return [block.removeprefix("data: ") for block in response.text.split("\n\n") if block.startswith("data: ")]


def chunks_of(response, model):
    """The chunks of a stream that ended well."""
    *events, done = events_of(response)
    assert done == "[DONE]"
    for event in events:
        model.model_validate_json(event, strict=True)
    chunks = [json.loads(event) for event in events]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    return chunks


def choices_of(chunks, index):
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def test_chat_stream(client, fake):
    chunks = chunks_of(client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3, "n": 2}), ChatCompletionChunk)
    assert chunks[0]["id"] == fake.requests[0].request_id
    assert not fake.requests[0].output.final_only
    for index in (0, 1):
        choices = choices_of(chunks, index)
        assert [choice["delta"] for choice in choices] == [
            {"role": "assistant", "content": ""}, {"content": "w0 "}, {"content": "w1 "}, {"content": "w2 "}, {},
        ]  # fmt: skip
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "length"]
    assert all("usage" not in chunk for chunk in chunks)


def test_text_stream_of_several_prompts(client, fake):
    body = {**TEXT, "prompt": ["a b c", "d"], "n": 2, "max_tokens": 2}
    chunks = chunks_of(client.post("/v1/completions", json=body), CompletionChunk)
    for index in range(4):
        choices = choices_of(chunks, index)
        assert [choice["text"] for choice in choices] == ["w0 ", "w1 ", ""]
        assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_usage_comes_last_and_alone(client, fake, path, body):
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = chunks_of(
        client.post(path, json={**body, **options, "max_tokens": 3}),
        ChatCompletionChunk if "chat" in path else CompletionChunk,
    )
    assert last["choices"] == []
    assert last["usage"] == client.post(path, json={**body, "max_tokens": 3, "stream": False}).json()["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


def test_any_text_passes(client, fake):
    fake.words = ["🚀", "\n\ndata: [DONE]\n\n", "\u2028", '"}', "\x00", "é"]
    chunks = chunks_of(client.post("/v1/completions", json=TEXT), CompletionChunk)
    assert [choice["text"] for choice in choices_of(chunks, 0)] == [*fake.words, ""]


def test_pieces_without_text_are_not_sent(client, fake):
    fake.words = ["", "a", "", "b"]
    chunks = chunks_of(client.post("/v1/completions", json=TEXT), CompletionChunk)
    assert [choice["text"] for choice in choices_of(chunks, 0)] == ["a", "b", ""]


def test_text_is_sent_as_it_comes(client, fake):
    """The router is held after each word until the client has read it: nothing may wait for what comes next."""
    fake.gates = [threading.Event() for _ in range(4)]
    with client.stream("POST", "/v1/completions", json=TEXT) as response:
        lines = response.iter_lines()
        for place, gate in enumerate(fake.gates):
            gate.set()
            line = next(line for line in lines if line.startswith("data: "))
            assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == f"w{place} "


@pytest.mark.parametrize("prompt", ["one", ["one", "two"]], ids=["single", "batch"])
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Failure(grpc.StatusCode.UNAVAILABLE, "the worker died", (retry_after(1),)), "service_unavailable"),
        (Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "late"), "timeout"),
        (Failure(grpc.StatusCode.UNKNOWN, "SECRET"), "internal_error"),
    ],
)
def test_a_failure_in_mid_stream_is_an_event_and_no_end(client, fake, prompt, failure, code):
    fake.failure_after_tokens = (2, failure)
    response = client.post("/v1/completions", json={**TEXT, "prompt": prompt, "max_tokens": 5})
    *chunks, last = events_of(response)
    assert len(chunks) >= 2
    assert ErrorReply.model_validate_json(last, strict=True).error.code == code
    assert "[DONE]" not in response.text
    assert "SECRET" not in response.text
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert client.get("/health").status_code == 200


def test_an_incomplete_stream_has_no_end(client, fake):
    fake.script = [inference_pb2.GenerateEvent(started=inference_pb2.Started(prompt_tokens=1))]
    *_, last = events_of(client.post("/v1/completions", json=TEXT))
    assert json.loads(last)["error"]["code"] == "internal_error"


def test_silence_is_broken_by_comments(client, fake, monkeypatch):
    monkeypatch.setattr(stream_module, "KEEP_ALIVE_S", 0.02)
    fake.delay_token = 0.2
    response = client.post("/v1/completions", json={**TEXT, "max_tokens": 2})
    assert ": keep-alive" in response.text.split("\n\n")
    chunks = chunks_of(response, CompletionChunk)
    assert [choice["text"] for choice in choices_of(chunks, 0)] == ["w0 ", "w1 ", ""]


def test_many_streams_at_once(client, fake):
    results: list[str] = []

    def one():
        chunks = chunks_of(client.post("/v1/completions", json={**TEXT, "max_tokens": 20}), CompletionChunk)
        results.append(chunks[0]["id"])
        assert "".join(choice["text"] for choice in choices_of(chunks, 0)) == "".join(f"w{i} " for i in range(20))

    threads = [threading.Thread(target=one) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(results)) == 32


@pytest.fixture
def official(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_official_client_reads_replies_and_streams(official, fake):
    messages = CHAT["messages"]
    assert [model.id for model in official.models.list()] == [MODEL]
    reply = official.chat.completions.create(model=MODEL, messages=messages, max_tokens=3)
    assert reply.choices[0].message.content == "w0 w1 w2 "
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    text, reasons, usage = "", [], None
    with official.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=3, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        for chunk in chunks:
            usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (text, reasons) == ("w0 w1 w2 ", ["length"])
    assert usage.completion_tokens == 3
    assert official.completions.create(model=MODEL, prompt="x", max_tokens=2).choices[0].text == "w0 w1 "


def test_official_client_raises_its_own_errors(official, fake):
    messages = CHAT["messages"]
    with pytest.raises(openai.BadRequestError) as bad:
        official.chat.completions.create(model=MODEL, messages=messages, max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        official.chat.completions.create(model="other", messages=messages)
    assert missing.value.code == "model_not_found"
    fake.refusal = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (retry_after(1),))
    with pytest.raises(openai.RateLimitError):
        official.chat.completions.create(model=MODEL, messages=messages)
    fake.reset()
    fake.failure_after_tokens = (1, Failure(grpc.StatusCode.UNAVAILABLE, "the worker died", (retry_after(1),)))
    with (
        official.chat.completions.create(model=MODEL, messages=messages, stream=True) as chunks,
        pytest.raises(openai.APIError, match="the worker died"),
    ):
        list(chunks)

"""Chunks written by hand are what their models say, whatever the text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chunks import CHAT, COMPLETION, DONE, Chunks, event
from gateway.generation import Ending
from gateway.replies import (
    ChatCompletionChunk,
    CompletionChunk,
    CompletionTokensDetails,
    PromptTokensDetails,
    UsageReply,
)

MODELS = {CHAT.object: ChatCompletionChunk, COMPLETION.object: CompletionChunk}
TEXT = st.text(st.characters(exclude_categories=("Cs",)))
USAGE = UsageReply(
    prompt_tokens=5,
    completion_tokens=7,
    total_tokens=12,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=4),
    completion_tokens_details=CompletionTokensDetails(reasoning_tokens=2),
)


def payloads(data: bytes) -> list[dict]:
    """The JSON objects of some events; every event must be one line of data and an empty one."""
    events = data.split(b"\n\n")
    assert events.pop() == b""
    for one in events:
        assert one.startswith(b"data: ")
        assert b"\n" not in one
        assert b"\r" not in one
    return [json.loads(one.removeprefix(b"data: ")) for one in events]


def make(shape, *, include_usage=False, num_choices=3, model="org/m", id="x-1"):
    return Chunks(shape, id=id, created=123, model=model, num_choices=num_choices, include_usage=include_usage)


@given(shape=st.sampled_from([CHAT, COMPLETION]), text=TEXT, model=TEXT, stop=TEXT, include_usage=st.booleans())
def test_any_text_comes_back(shape, text, model, stop, include_usage):
    chunks = make(shape, model=model, include_usage=include_usage)
    (piece,) = payloads(chunks.text(2, text))
    (last,) = payloads(chunks.finish(1, Ending("stop", stop)))
    for chunk in (piece, last):
        parsed = MODELS[shape.object].model_validate(chunk, strict=True)
        assert (parsed.id, parsed.created, parsed.model) == ("x-1", 123, model)
        assert ("usage" in chunk) == include_usage
    choice = piece["choices"][0]
    assert choice["index"] == 2
    assert (choice["delta"]["content"] if shape is CHAT else choice["text"]) == text
    assert choice["finish_reason"] is None
    choice = last["choices"][0]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (1, "stop", stop)


def test_opening_names_the_speaker_of_each_choice():
    opening = payloads(make(CHAT).opening())
    assert [chunk["choices"][0]["index"] for chunk in opening] == [0, 1, 2]
    for chunk in opening:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert make(COMPLETION).opening() == b""


@pytest.mark.parametrize("shape", [CHAT, COMPLETION])
def test_usage_has_a_chunk_without_choices(shape):
    (chunk,) = payloads(make(shape, include_usage=True).end(USAGE).removesuffix(DONE))
    assert make(shape).end(USAGE) == DONE
    assert chunk["choices"] == []
    assert chunk["usage"] == USAGE.model_dump()
    MODELS[shape.object].model_validate(chunk, strict=True)


@given(TEXT)
def test_an_error_is_one_event(message):
    assert payloads(event({"error": {"message": message}})) == [{"error": {"message": message}}]

"""Whatever a client sends, the answer is its own fault or a reply: never a 5xx."""

import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.messages.replies import MessagesErrorReply
from gateway.messages.schema import MessagesBody
from gateway.replies import ErrorReply
from gateway.responses.schema import ResponsesBody
from gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.integration.fake_inference import MODEL, FakeInference, running_stack
from tests.integration.gateway_fuzz import BODIES as GOOD
from tests.integration.gateway_fuzz import fuzz

BODIES = {
    "/v1/chat/completions": (ChatBody, {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}),
    "/v1/completions": (CompletionBody, {"model": MODEL, "prompt": "x"}),
    "/v1/responses": (ResponsesBody, {"model": MODEL, "input": "x"}),
    "/v1/messages": (MessagesBody, {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    "/tokenize": (TokenizeBody, {"model": MODEL, "prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"model": MODEL, "tokens": [120]}),
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 20)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["text", "user", "auto", "\ud800", "\x00"])
)
KEYS = st.sampled_from(["role", "content", "type", "text", "name", "include_usage", "1", "\udfff"]) | st.text(
    max_size=3
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)


@pytest.fixture(scope="module")
def client():
    with running_stack(FakeInference(words=["x"])) as stack, httpx.Client(base_url=stack.url, timeout=20) as client:
        yield client


@settings(max_examples=400, deadline=None)
@given(data=st.data(), path=st.sampled_from(sorted(BODIES)))
def test_no_body_is_the_servers_fault(client, data, path):
    model, body = BODIES[path]
    names = st.sampled_from(sorted(model.model_fields)) | st.text(max_size=4)
    body = {**body, **data.draw(st.dictionaries(names, JSON, max_size=3))}
    check(client.post(path, content=json.dumps(body), headers={"content-type": "application/json"}))


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=40), path=st.sampled_from(sorted(BODIES)))
def test_no_bytes_are_the_servers_fault(client, content, path):
    check(client.post(path, content=content, headers={"content-type": "application/json"}))


def check(response):
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        model = MessagesErrorReply if response.url.path == "/v1/messages" else ErrorReply
        model.model_validate_json(response.content, strict=True)


@pytest.mark.parametrize("path", GOOD)
def test_what_is_spoilt_was_good(client, path):
    response = client.post(path, json={**GOOD[path], "model": MODEL})
    assert response.status_code == 200, response.text


@pytest.mark.slow
def test_a_process_stands_thousands_of_them():
    outcome = fuzz(6000, seed=3)
    assert outcome.faults == []
    assert outcome.statuses[200] > 300, "what is odd must not always be wrong"
    warm, *_, last = list(outcome.resident.values())[2:]
    assert last - warm < 8 * 2**20

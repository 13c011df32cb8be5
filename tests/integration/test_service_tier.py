"""Service tiers over HTTP: the class that the router is asked for, and what the reply says of it."""

import json

import httpx
import pytest

from gateway.service_tier import CLASSES
from protos.api_keys import ApiKey, digest_of
from tests.integration.fake_inference import MODEL, FakeInference, running_stack

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello there"}]}
KEYS = (ApiKey(digest_of("free")), ApiKey(digest_of("bound"), priority_ceiling=0))


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference(), api_keys=KEYS) as stack:
        yield stack


@pytest.fixture(autouse=True)
def fake(stack):
    stack.fake.reset()
    stack.fake.takes_priorities = True
    return stack.fake


def post(stack, path="/v1/chat/completions", key="free", **fields):
    body = {**CHAT, **fields} if "chat" in path else {"model": MODEL, **fields}
    response = httpx.post(stack.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=20)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(
    ("fields", "priority", "told", "ignored"),
    [
        ({}, 0, None, None),
        ({"service_tier": "auto"}, 0, "default", None),
        ({"service_tier": "default"}, 0, "default", None),
        ({"service_tier": "flex"}, CLASSES["flex"], "flex", None),
        ({"service_tier": "priority"}, CLASSES["priority"], "priority", None),
        ({"service_tier": "scale"}, 0, "default", "service_tier"),
        ({"service_tier": "flex", "priority": -3}, -3, "priority", "service_tier"),
    ],
)
def test_a_tier_is_a_class(stack, fake, fields, priority, told, ignored):
    response = post(stack, **fields)
    assert fake.requests[0].priority == priority
    assert response.json().get("service_tier") == told
    assert response.headers.get("x-quire-ignored-fields") == ignored
    chunks = [line for line in post(stack, stream=True, **fields).text.split("\n") if line.startswith("data: {")]
    assert {json.loads(chunk[6:]).get("service_tier") for chunk in chunks} == {told}


def test_the_more_urgent_tier_has_the_lower_class():
    assert CLASSES["priority"] < 0 < CLASSES["flex"]


@pytest.mark.parametrize("tier", sorted(CLASSES))
def test_where_workers_have_no_classes_a_tier_has_no_effect(stack, fake, tier):
    fake.takes_priorities = False
    response = post(stack, service_tier=tier)
    assert fake.requests[0].priority == 0
    assert response.json()["service_tier"] == "default"
    assert response.headers["x-quire-ignored-fields"] == "service_tier"


def test_a_key_bounds_the_tier(stack, fake):
    response = post(stack, key="bound", service_tier="priority")
    assert fake.requests[0].priority == 0
    assert response.json()["service_tier"] == "default"
    assert post(stack, key="bound", service_tier="flex").json()["service_tier"] == "flex"


def test_the_other_endpoints_have_tiers(stack, fake):
    post(stack, "/v1/completions", prompt=["a", "b"], service_tier="flex")
    assert [request.priority for request in fake.requests] == [CLASSES["flex"]] * 2
    assert post(stack, "/v1/responses", input="a", service_tier="flex").json()["service_tier"] == "flex"
    assert post(stack, "/v1/responses", input="a").json()["service_tier"] == "default"

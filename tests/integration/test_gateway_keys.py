"""Keys over HTTP: who is let in, whose request it is, and what is too much."""

import hashlib

import httpx
import openai
import pytest

from protos.api_keys import ApiKey, digest_of
from tests.doubles.processes import wait_until
from tests.integration.fake_inference import MODEL, FakeInference, running_stack

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello there"}]}
KEYS = (
    ApiKey(digest_of("plain")),
    ApiKey(digest_of("polite"), tenant="research", priority_ceiling=3),
    ApiKey(digest_of("rare"), requests_per_minute=2),
    ApiKey(digest_of("counter"), requests_per_minute=2),
    ApiKey(digest_of("other counter"), requests_per_minute=2),
    ApiKey(digest_of("short"), tokens_per_minute=5),
    ApiKey(digest_of("dropper"), tokens_per_minute=6),
    ApiKey(digest_of("single"), max_concurrent_requests=1),
)


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference(), api_keys=KEYS, allowed_origins=("https://a.example",)) as stack:
        yield stack


@pytest.fixture(autouse=True)
def fake(stack):
    stack.fake.reset()
    return stack.fake


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def post(stack, key="plain", **fields):
    return httpx.post(f"{stack.url}/v1/chat/completions", json={**CHAT, **fields}, headers=bearer(key), timeout=20)


ROUTES = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"), ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"),
    ("GET", "/load"), ("GET", "/fleet"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/no/such/path"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer("plai"),
        {"authorization": "Bearer"},
        {"authorization": "plain"},
        {"authorization": "Basic plain"},
        {"x-api-key": "wrong"},
        bearer(hashlib.sha256(b"plain").hexdigest()),
        bearer("plain" * 1000),
    ],
    ids=str,
)
def test_nobody_comes_in_without_a_key(stack, method, path, headers):
    response = httpx.request(method, stack.url + path, json=CHAT if method == "POST" else None, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert "plain" not in response.text
    assert stack.fake.requests == stack.fake.calls == []


MESSAGES = ["/v1/messages", "/v1/messages/count_tokens"]


@pytest.mark.parametrize("path", MESSAGES)
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"x-api-key": "wrong"}], ids=str)
def test_another_form_of_errors_is_guarded_as_well(stack, path, headers):
    response = httpx.post(stack.url + path, json={**CHAT, "max_tokens": 5}, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert stack.fake.requests == stack.fake.calls == []


def test_the_list_of_routes_is_complete(stack):
    """A route that is not in the list above is not known to be guarded."""
    document = httpx.get(f"{stack.url}/openapi.json", headers=bearer("plain")).json()
    known = {path for _, path in ROUTES} | {"/livez", "/readyz", "/health", *MESSAGES}
    assert {path.replace("{model}", MODEL) for path in document["paths"]} <= known


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health"])
def test_probes_need_none(stack, path):
    assert httpx.get(stack.url + path).status_code == 200


def test_web_pages_may_ask_whether_they_may_call_and_read_the_refusal(stack):
    url, origin = f"{stack.url}/v1/models", {"origin": "https://a.example"}
    asked = {**origin, "access-control-request-method": "GET", "access-control-request-headers": "authorization"}
    assert httpx.options(url, headers=asked).status_code == 200
    refused = httpx.get(url, headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")


@pytest.mark.parametrize(
    "headers", [bearer("plain"), {"authorization": "bearer plain"}, {"x-api-key": "plain"}], ids=str
)
def test_a_key_lets_in(stack, headers):
    assert httpx.get(f"{stack.url}/v1/models", headers=headers).status_code == 200


def test_the_official_client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="plain", max_retries=0) as client:
        assert client.chat.completions.create(**CHAT).choices[0].finish_reason == "length"
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_tenant_is_the_keys(stack):
    assert post(stack, "polite", user="ann").status_code == 200
    assert post(stack, "plain", user="ann").status_code == 200
    assert post(stack, "plain").status_code == 200
    first, second, third = (request.tenant for request in stack.fake.requests)
    account, user = first.split("/")
    assert account == "research"
    # A key without a tenant stands for itself; users are parts of accounts.
    assert second == f"{third}/{user}"
    assert third
    assert "plain" not in second
    assert "ann" not in first + second


def test_no_request_is_more_urgent_than_its_key_may_be(stack):
    assert post(stack, "polite").status_code == 200
    assert post(stack, "polite", priority=7).status_code == 200
    assert [request.priority for request in stack.fake.requests] == [3, 7]
    refused = post(stack, "polite", priority=2)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert post(stack, "plain", priority=-5).status_code == 200


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health"])
def test_probes_may_ask_for_the_head_alone(stack, path):
    response = httpx.head(stack.url + path)
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("key", ["counter", "other counter"])
def test_requests_for_tokens_are_counted_too(stack, key):
    """Not against tokens a minute, and not among those that run."""
    calls = [
        ("/tokenize", {"model": MODEL, "prompt": "Hello"}),
        ("/detokenize", {"model": MODEL, "tokens": [1]}),
        ("/v1/messages/count_tokens", CHAT),
    ]
    order = calls if key == "counter" else calls[::-1]
    responses = [httpx.post(stack.url + path, json=body, headers=bearer(key)) for path, body in order]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert responses[-1].headers["retry-after"]
    assert post(stack, key).status_code == 429


def test_requests_a_minute_are_counted(stack):
    while (last := post(stack, "rare")).status_code == 200:
        assert len(stack.fake.requests) <= 2
    assert last.status_code == 429
    assert 1 <= int(last.headers["retry-after"]) <= 61
    assert last.json()["error"]["code"] == "rate_limit_exceeded"
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="rare", max_retries=0)
    with client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(**CHAT)
    # Another key is another matter.
    assert post(stack, "plain").status_code == 200


def test_tokens_of_prompts_and_outputs_are_counted(stack):
    assert post(stack, "short", max_tokens=1).status_code == 200  # 3 of the prompt, 1 of the output
    assert post(stack, "short", max_tokens=1).status_code == 200
    assert post(stack, "short", max_tokens=1).status_code == 429


def test_tokens_of_streams_that_clients_leave_are_counted(stack):
    stack.fake.delay_token = 0.01
    with httpx.stream(
        "POST", f"{stack.url}/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 500},
        headers=bearer("dropper"), timeout=20,
    ) as response:  # fmt: skip
        for count, _ in enumerate(response.iter_lines()):
            if count > 12:
                break
    assert stack.fake.cancelled.acquire(timeout=10)
    wait_until(lambda: post(stack, "dropper", max_tokens=1).status_code == 429)


def test_requests_at_a_time_are_counted_to_their_ends(stack):
    stack.fake.delay_token = 0.05
    url = f"{stack.url}/v1/chat/completions"
    body = {**CHAT, "stream": True, "max_tokens": 200}
    with httpx.stream("POST", url, json=body, headers=bearer("single"), timeout=20) as running:
        assert running.status_code == 200
        refused = post(stack, "single")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert post(stack, "plain", max_tokens=1).status_code == 200
    stack.fake.delay_token = 0.0
    # The client left; its place is free again, also after failures.
    wait_until(lambda: post(stack, "single").status_code == 200)
    assert post(stack, "single", model="no such model").status_code == 404
    assert post(stack, "single").status_code == 200


def test_a_call_that_cannot_be_begun_holds_no_place(stack, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr("gateway.upstream.Generation", broken)
        assert post(stack, "single").status_code == 500
    assert post(stack, "single").status_code == 200

"""A worker that is killed: its requests end with a clear error, the service says so, and a new worker is taken up."""

import json

import httpx
import pytest

from tests.doubles.processes import Stack, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CHAT = {
    "model": "model",
    "messages": [{"role": "user", "content": "Tell me a long story about a river."}],
    "temperature": 0,
    "max_tokens": 1000,
}


@pytest.fixture
def stack(demo_model):
    stack = Stack(demo_model, "--max-model-len", "2048")
    stack.start()
    yield stack
    stack.close()


def test_killed_worker(stack):
    chat = f"{stack.url}/v1/chat/completions"
    short = {**CHAT, "max_tokens": 8}
    before = httpx.post(chat, json=short, timeout=60).json()["choices"][0]["message"]["content"]

    events = []
    with httpx.stream("POST", chat, json={**CHAT, "stream": True}, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line[len("data: ") :])
            if len(events) == 5:
                stack.kill("worker")
    assert "[DONE]" not in events, "a broken stream must not look complete"
    error = json.loads(events[-1])["error"]
    assert "worker" in error["message"]
    assert "lost" in error["message"]
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events[:-1])

    wait_until(lambda: not stack.healthy(), 10)
    refused = httpx.post(chat, json=short, timeout=10)
    assert refused.status_code == 503
    assert refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert httpx.get(f"{stack.url}/livez", timeout=5).status_code == 200

    stack.start_worker()
    wait_until(stack.healthy)
    again = httpx.post(chat, json=short, timeout=60).json()["choices"][0]["message"]["content"]
    assert again == before


def test_everything_ends_cleanly(stack):
    assert httpx.post(f"{stack.url}/v1/chat/completions", json={**CHAT, "max_tokens": 2}, timeout=60).is_success
    assert stack.close() == {"gateway": 0, "router": 0, "worker": 0}

"""A worker of the demo model that is killed: its streams go on with its successor as if nothing had been."""

import json
import threading

import httpx
import pytest

from tests.doubles.processes import Stack, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CHAT = {
    "model": "model",
    "messages": [{"role": "user", "content": "Tell me a long story about a river."}],
    "temperature": 0,
    "max_tokens": 120,
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
KINDS = {
    "greedy": {"logprobs": True, "top_logprobs": 2},
    "seeded": {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "constrained": {"structured_outputs": {"regex": "[a-z]{1,12}( [a-z]{1,12}){60,80}"}},
}


@pytest.fixture
def stack(demo_model):
    # In half precision, what a step gives does not depend on its shape: a prefill repeats what decoding gave.
    stack = Stack(demo_model, "--max-model-len", "1024", "--dtype", "bfloat16")
    stack.start()
    yield stack
    stack.close()


class Story:
    """A stream of one kind, read on a thread of its own."""

    def __init__(self, url: str, kind: str) -> None:
        self.text = ""
        self.logprobs: list[float] = []
        self.usage = None
        self.reason = None
        self.pieces = 0
        self.error = None
        self.complete = False
        self._thread = threading.Thread(target=self._read, args=(url, {**CHAT, **STREAMED, **KINDS[kind]}))
        self._thread.start()

    def _read(self, url: str, body: dict) -> None:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.complete = True
                elif line.startswith("data: "):
                    self._take(json.loads(line[len("data: ") :]))

    def _take(self, event: dict) -> None:
        self.error = event.get("error", self.error)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
            self.pieces += 1
            self.reason = choice["finish_reason"] or self.reason
            self.logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]

    def whole(self) -> "Story":
        self._thread.join()
        return self


def test_streams_go_on_with_the_next_worker(stack):
    expected = {kind: Story(stack.url, kind).whole() for kind in KINDS}
    stories = {kind: Story(stack.url, kind) for kind in KINDS}
    wait_until(lambda: all(story.pieces > 10 for story in stories.values()))
    stack.kill("worker")
    wait_until(lambda: not stack.healthy(), 10)
    refused = httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT, timeout=10)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert httpx.get(f"{stack.url}/livez", timeout=5).status_code == 200
    stack.start_worker()
    for kind, story in stories.items():
        story.whole()
        assert story.error is None, kind
        assert story.complete, kind
        assert (story.text, story.reason) == (expected[kind].text, expected[kind].reason), kind
        assert len(story.logprobs) == len(expected[kind].logprobs), kind
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert story.usage[name] == expected[kind].usage[name], kind


def test_streams_that_no_worker_takes_up_end_with_an_error(demo_model):
    stack = Stack(demo_model, "--max-model-len", "1024", router_flags=("--max-queue-wait", "1"))
    stack.start()
    try:
        story = Story(stack.url, "greedy")
        wait_until(lambda: story.pieces > 5)
        stack.kill("worker")
        story.whole()
        assert not story.complete, "a broken stream must not look complete"
        assert "the worker running this request was lost and no other" in story.error["message"]
        assert story.reason is None
    finally:
        stack.close()


def test_everything_ends_cleanly(stack):
    body = {**CHAT, "max_tokens": 2}
    assert httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60).is_success
    assert stack.close() == {"gateway": 0, "router": 0, "worker": 0}

"""The built-in page: its headers, the figures it asks for, and what a browser makes of it."""

import re

import grpc
import httpx
import pytest

from gateway.access.guard import PAGE_PATHS
from gateway.fleet_reply import FleetReply
from protos import inference_pb2
from protos.api_keys import ApiKey, digest_of
from tests.doubles.chromium import Page, find_chromium
from tests.integration.fake_inference import MODEL, Failure, FakeInference, running_stack

WORKER = inference_pb2.GetLoadResponse.Worker
LOAD = inference_pb2.GetLoadResponse(
    waiting=3,
    workers=[
        WORKER(
            address="10.0.0.1:50061", name="w0", ready=True, running=5, waiting=1, total_blocks=100, used_blocks=40,
            cached_blocks=35, free_blocks=25, block_size=16, prefix_cache_queries=1000, prefix_cache_hits=625,
        ),
        WORKER(address="10.0.0.2:50061", name="w1"),
    ],
)  # fmt: skip


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference(), api_keys=(ApiKey(digest_of("secret")),), reasoning_parser="qwen3") as stack:
        yield stack


@pytest.fixture
def fake(stack):
    stack.fake.reset()
    stack.fake.load.CopyFrom(LOAD)
    return stack.fake


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_the_page_is_served_without_a_key_and_closed_to_others(stack, path):
    response = httpx.get(stack.url + path)
    assert response.status_code == 200
    assert response.headers["content-type"].split(";")[0] in ("text/html", "text/css", "text/javascript")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    # Nothing is fetched from elsewhere, and what is named is there.
    assert "//" not in re.sub(r"^\s*//.*$| // .*$", "", response.text, flags=re.MULTILINE)
    for name in re.findall(r'"(/page/[^"]+)"', response.text):
        assert name in PAGE_PATHS


def test_the_fleet_is_told_with_a_key(stack, fake):
    assert httpx.get(f"{stack.url}/fleet").status_code == 401
    with_key = {"headers": {"authorization": "Bearer secret"}}
    reply = FleetReply.model_validate_json(httpx.get(f"{stack.url}/fleet", **with_key).content, strict=True)
    assert reply.waiting == 3
    first, second = reply.workers
    assert (first.address, first.ready, first.running, first.waiting) == ("10.0.0.1:50061", True, 5, 1)
    assert first.kv_blocks.model_dump() == {"total": 100, "used": 40, "cached": 35, "free": 25}
    assert (first.prefix_cache_hits, first.prefix_cache_queries) == (625, 1000)
    assert (second.ready, second.kv_blocks.total) == (False, 0)
    fake.refusal = Failure(grpc.StatusCode.UNAVAILABLE)
    assert httpx.get(f"{stack.url}/fleet", **with_key).status_code == 503


@pytest.fixture
def page(tmp_path):
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine; on Debian: apt-get install chromium")
    page = Page(program, tmp_path)
    yield page
    page.close()


def text(page, selector):
    return page.evaluate(f"document.querySelector('{selector}').innerText")


def say(page, words):
    page.evaluate(f"document.getElementById('question').value = {words!r}")
    page.evaluate("document.getElementById('send').click()")


def give_key(page, key):
    page.evaluate(f"document.getElementById('key').value = {key!r}")
    page.evaluate("document.getElementById('key').dispatchEvent(new Event('change'))")


def test_a_chat_in_a_browser(stack, fake, page):
    fake.words = ["<think>", "Hm", "</think>", "<b>Paris", "</b>", " it is"]
    page.open(stack.url)
    page.until("document.getElementById('error').innerText.includes('API key')")
    page.until("document.getElementById('fleet-error').innerText.includes('API key')")
    give_key(page, "secret")
    page.until(f"document.getElementById('model').value === '{MODEL}'")
    assert page.evaluate("document.getElementById('error').hidden")
    page.evaluate("document.getElementById('system').value = 'Be brief.'")
    page.evaluate("document.getElementById('temperature').value = '0.5'")
    page.evaluate("document.getElementById('max-tokens').value = '9'")
    say(page, "What is the capital of France?")
    page.until("document.querySelector('#turns .assistant small')?.innerText.includes('6 out')")
    # What the model writes is text, whatever it looks like.
    assert text(page, "#turns .assistant > span") == "<b>Paris</b> it is"
    assert page.evaluate("document.querySelector('#turns details').textContent") == "ReasoningHm"
    request = fake.requests[-1]
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [
        ("system", "Be brief."), ("user", "What is the capital of France?"),
    ]  # fmt: skip
    assert (request.sampling.temperature, request.stopping.max_tokens) == (0.5, 9)
    say(page, "And of Italy?")
    page.until("document.querySelectorAll('#turns .assistant small').length === 2")
    page.until("document.getElementById('stop').hidden")
    assert [turn.role for turn in fake.requests[-1].chat.messages] == ["system", "user", "assistant", "user"]
    page.evaluate("document.getElementById('clear').click()")
    assert text(page, "#turns") == ""
    assert [line for line in page.complaints if "401" not in line] == []


def test_an_answer_can_be_stopped(stack, fake, page):
    fake.words, fake.delay_token = ["word "] * 1000, 0.02
    page.open(stack.url)
    give_key(page, "secret")
    page.until("document.getElementById('model').value !== ''")
    say(page, "Talk")
    page.until("document.querySelector('#turns .assistant > span')?.innerText.includes('word')")
    page.evaluate("document.getElementById('stop').click()")
    assert fake.cancelled.acquire(timeout=10)
    page.until("document.querySelector('#turns .assistant small').innerText === 'stopped'")
    assert page.evaluate("document.getElementById('stop').hidden")
    # The key is kept for this tab alone.
    assert page.evaluate("sessionStorage.getItem('key') === 'secret' && localStorage.length === 0")


def test_a_question_without_an_answer_can_be_asked_again(stack, fake, page):
    page.open(stack.url)
    give_key(page, "secret")
    page.until("document.getElementById('model').value !== ''")
    fake.refusal = Failure(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is too long")
    say(page, "Why?")
    page.until("document.getElementById('error').innerText === 'the prompt is too long'")
    assert page.evaluate("document.getElementById('question').value") == "Why?"
    assert text(page, "#turns") == ""


def test_the_fleet_in_a_browser(stack, fake, page):
    page.open(stack.url)
    give_key(page, "secret")
    page.until("document.getElementById('running').innerText === '5'")
    assert text(page, "#waiting") == "4"
    assert text(page, "#hits") == "63\xa0%"
    assert "40 used, 35 cached, 25 free" in text(page, "#workers li")
    assert page.evaluate("document.querySelector('rect.cached').getAttribute('x')") == "40"
    assert "away" in text(page, "#workers li:nth-child(2)")
    fake.load.workers[0].running = 7
    page.until("document.getElementById('running').innerText === '7'")

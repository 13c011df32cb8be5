"""Output policies of keys over HTTP, before a scripted router: what is ended, what is redacted, what it costs."""

import itertools
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.__main__ import main
from protos import inference_pb2, sampling_pb2
from protos.api_keys import ApiKey, OutputPolicy, digest_of
from tests.doubles.processes import wait_until
from tests.integration.fake_inference import MODEL, FakeInference, running_stack

ASK = [{"role": "user", "content": "Hello there"}]
NUMBER = "[0-9]{3}-[0-9]{4}"
KEYS = (
    ApiKey(digest_of("free")),
    ApiKey(digest_of("end"), output_policy=OutputPolicy((NUMBER, "(?i)secret"))),
    ApiKey(digest_of("redact"), output_policy=OutputPolicy((NUMBER,), "redact")),
    ApiKey(digest_of("end-spaced"), output_policy=OutputPolicy((r"foo\sbar", "Paris"))),
    ApiKey(digest_of("redact-spaced"), output_policy=OutputPolicy((r"foo\sbar", "Paris"), "redact")),
    ApiKey(digest_of("short"), output_policy=OutputPolicy(max_chars=10)),
    ApiKey(digest_of("counted"), tokens_per_minute=20, output_policy=OutputPolicy(("secret",))),
)


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference(), api_keys=KEYS, tool_call_parser="hermes", reasoning_parser="qwen3") as stack:
        yield stack


@pytest.fixture(autouse=True)
def fake(stack):
    stack.fake.reset()
    return stack.fake


def post(stack, key, path="/v1/chat/completions", **fields):
    body = {"model": MODEL, **({"messages": ASK} if "chat" in path else {}), **fields}
    return httpx.post(stack.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=20)


def whole(stack, key, **fields):
    (choice,) = post(stack, key, **fields).json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def streamed(stack, key, **fields):
    lines = post(stack, key, stream=True, **fields).text.split("\n")
    assert "data: [DONE]" in lines
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    pieces = [choice["delta"].get("content") or "" for choice in choices]
    return "".join(pieces), choices[-1]["finish_reason"]


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_match_ends_the_output(stack, fake, ask):
    fake.words = ["Call ", "555", "-01", "234", " now"]
    assert ask(stack, "end") == ("Call ", "content_filter")
    assert ask(stack, "free") == ("Call 555-01234 now", "length")


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_match_is_redacted(stack, fake, ask):
    fake.words = ["Call ", "555", "-01", "234", " or 555-0", "000"]
    assert ask(stack, "redact") == ("Call [redacted]4 or [redacted]", "content_filter")
    fake.words = ["Call 555-", "me"]
    assert ask(stack, "redact") == ("Call 555-me", "length")


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_longest_output(stack, fake, ask):
    fake.words = ["Call ", "me by my", " name"]
    assert ask(stack, "short") == ("Call me by", "length")


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 29), max_size=8))
def test_no_chunk_has_a_part_of_a_match(stack, cuts):
    text = "It is 12-555-0123-4, or SECRET."
    places = sorted({0, len(text), *cuts})
    stack.fake.words = [text[start:end] for start, end in itertools.pairwise(places)]
    assert streamed(stack, "end") == ("It is 12-", "content_filter")
    assert streamed(stack, "redact") == ("It is 12-[redacted]-4, or SECRET.", "content_filter")


@pytest.mark.parametrize("key", ["end", "short"])
@pytest.mark.parametrize("stream", [True, False])
def test_the_router_is_told_that_nothing_more_is_wanted(stack, fake, stream, key):
    fake.words, fake.delay_token = ["a ", "secret", " too", " long", *["word "] * 500], 0.02
    response = post(stack, key, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    assert fake.cancelled.acquire(timeout=10)
    replies = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    usage = (replies[-1] if stream else response.json())["usage"]
    assert usage["completion_tokens"] == 3
    wait_until(
        lambda: httpx.get(f"{stack.url}/load", headers={"authorization": "Bearer free"}).json()["server_load"] == 0
    )


def test_other_choices_go_on(stack, fake):
    response = inference_pb2.GenerateEvent

    def delta(index, text):
        return response(delta=inference_pb2.Delta(index=index, text=text))

    def finished(index):
        return response(finished=inference_pb2.Finished(index=index, reason=sampling_pb2.FINISH_REASON_STOP))

    fake.script = [
        response(started=inference_pb2.Started(request_id="x", model=MODEL, prompt_tokens=1)),
        *[delta(0, "my secret"), delta(1, "your "), delta(0, " is out"), delta(1, "cat"), finished(0), finished(1)],
    ]
    lines = post(stack, "end", stream=True, n=2).text.split("\n")
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    texts, reasons = ["", ""], [None, None]
    for choice in choices:
        assert reasons[choice["index"]] is None
        texts[choice["index"]] += choice["delta"].get("content") or ""
        reasons[choice["index"]] = choice["finish_reason"]
    assert (texts, reasons) == (["my ", "your cat"], ["content_filter", "stop"])


def test_reasoning_and_arguments_are_outputs_too(stack, fake):
    fake.words, fake.stop_string = ["<think>a se", "cret</think>", "Yes"], "x"
    (choice,) = post(stack, "end").json()["choices"]
    assert choice["finish_reason"] == "content_filter"
    assert choice["message"]["reasoning_content"] == "a"
    fake.words = ['<tool_call>{"name": "f", "arguments": {"a": "555-', '0123"}}</tool_call>']
    tools = [{"type": "function", "function": {"name": "f"}}]
    (choice,) = post(stack, "redact", tools=tools).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "[redacted]"}'


def test_the_other_apis_have_words_for_it(stack, fake):
    fake.words = ["my ", "secret"]
    reply = post(stack, "end", "/v1/responses", input="Hello").json()
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
    reply = post(stack, "end", "/v1/messages", messages=ASK, max_tokens=9).json()
    assert (reply["stop_reason"], reply["content"][0]["text"]) == ("refusal", "my ")
    reply = post(stack, "end", "/v1/completions", prompt="Hello", echo=True).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("Hellomy ", "content_filter")


TOOLS = [{"type": "function", "function": {"name": "f"}}]


def called(words):
    return {"tools": TOOLS}, ['<tool_call>{"name": "f", "arguments": ', *words, "}</tool_call>"]


ESCAPED = {
    "an escape": called(['{"x": "P', r'\u0061ris"}']),
    "a key": called([r'{"P\u0061ris": 1}']),
    "a repeated key": called([r'{"x": "P\u0061ris", "x": 1}']),
    "arguments in a string": called([r'"{\"x\": \"P\u0061ris\"}"']),
    "arguments in a string, escaped twice": called([r'"{\"x\": \"P\\u0061ris\"}"']),
    "a line break": called([r'{"x": ["foo\nbar"]}']),
    "cut short": ({"tools": TOOLS}, [r'<tool_call>{"name": "f", "arguments": {"x": "P\u0061ris']),
    "forced": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ['{"x": "fo', r'o\nbar"}'],
    ),
}


@pytest.mark.parametrize("case", ESCAPED)
@pytest.mark.parametrize("key", ["end-spaced", "redact-spaced"])
def test_arguments_are_looked_at_as_those_who_get_them_read_them(stack, fake, key, case):
    fields, fake.words = ESCAPED[case]
    fake.stop_string = "x"
    streamed_text = post(stack, key, stream=True, **fields).text
    response = post(stack, key, **fields)
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "content_filter"
    assert '"finish_reason":"content_filter"' in streamed_text
    shown = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
    assert key.startswith("redact") or shown == []
    for text in [streamed_text, response.text, *shown]:
        assert "aris" not in text
        assert "0061ris" not in text
        assert "bar" not in text
    if key.startswith("redact") and case not in ("cut short", "a repeated key"):
        assert "[redacted]" in str(json.loads(shown[0]))


def test_the_input_of_a_messages_tool_is_looked_at(stack, fake):
    fake.words, fake.stop_string = [r'{"x":"foo\nbar"}'], "x"
    fields = {
        "messages": ASK,
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    reply = post(stack, "end-spaced", "/v1/messages", **fields).json()
    assert (reply["stop_reason"], reply["content"]) == ("refusal", [])
    reply = post(stack, "redact-spaced", "/v1/messages", **fields).json()
    assert (reply["stop_reason"], reply["content"][0]["input"]) == ("refusal", {"x": "[redacted]"})
    assert "bar" not in post(stack, "end-spaced", "/v1/messages", stream=True, **fields).text


@pytest.mark.parametrize(("key", "quoted"), [("end-spaced", False), ("free", True)])
def test_errors_quote_nothing_that_was_not_looked_at(stack, fake, key, quoted):
    event = inference_pb2.GenerateEvent
    fake.script = [
        event(started=inference_pb2.Started(request_id="x", model=MODEL, prompt_tokens=1)),
        event(delta=inference_pb2.Delta(text=r'{"x": "P\u0061ris"}')),
        event(finished=inference_pb2.Finished(reason=sampling_pb2.FINISH_REASON_STOP)),
    ]
    schema = {"type": "object", "properties": {"x": {"enum": ["a"]}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = post(stack, key, response_format=wanted).json()["error"]
    assert error["code"] == "invalid_output"
    assert ("Paris" in error["message"]) == quoted


def test_text_around_a_call_is_one_text(stack, fake):
    fake.words, fake.stop_string = ["Go to Pa", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "ris now"], "x"
    (choice,) = post(stack, "end-spaced", tools=TOOLS).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Go to ", "content_filter")
    fake.words[-1] = "per now"
    (choice,) = post(stack, "end-spaced", tools=TOOLS).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Go to Paper now", "tool_calls")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_a_call_with_a_match_ends_what_still_runs(stack, fake):
    fake.words = [r'<tool_call>{"name": "f", "arguments": {"x": "P\u0061ris"}}</tool_call> ', *["word "] * 500]
    fake.delay_token = 0.02
    for stream in (True, False):
        post(stack, "end-spaced", tools=TOOLS, stream=stream)
        assert fake.cancelled.acquire(timeout=10)


def test_log_probabilities_would_tell_everything(stack, fake):
    error = post(stack, "end", logprobs=True).json()["error"]
    assert error["param"] == "logprobs"
    assert fake.requests == []
    assert post(stack, "free", logprobs=True).status_code == 200


def test_what_was_cut_off_is_charged(stack, fake):
    fake.words, fake.delay_token = [*["word "] * 30, "secret", *["word "] * 500], 0.001
    assert post(stack, "counted", stream=True).status_code == 200
    wait_until(lambda: post(stack, "counted").status_code == 429)


def test_a_bad_pattern_is_said_at_the_start(tmp_path, capsys):
    path = tmp_path / "keys.json"
    entry = {"sha256": digest_of("x").hex(), "output_policy": {"banned_patterns": ["a", "(?=b)"]}}
    path.write_text(json.dumps({"keys": [entry]}))
    assert main(["--api-keys-file", str(path), "--port", "0"]) == 1
    assert "'(?=b)' matches the empty text" in capsys.readouterr().err

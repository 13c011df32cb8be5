"""Tools, reasoning and checked output over HTTP, before a router whose words are scripted."""

import json
from itertools import pairwise

import httpx
import openai
import pytest

from gateway.replies import ChatCompletion, ChatCompletionChunk, ErrorReply
from gateway.schema import MAX_TOOLS
from gateway.tools import MAX_PARALLEL_CALLS, MAX_TOOLS_CHARS
from protos import inference_pb2, sampling_pb2
from tests.integration.fake_inference import MODEL, FakeInference, running_stack

STOP, LENGTH = sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH
ASK = [{"role": "user", "content": "Is it warm in Rome?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ROME = '{"city": "Rome"}'
CALL = f'{{"name": "weather", "parameters": {ROME}}}'
TAGGED = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}
COLOUR = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"enum": ["red", "green"]}}}


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference()) as stack:
        yield stack


@pytest.fixture(scope="module")
def tagged_stack():
    """With a model that thinks, and calls tools as Qwen does."""
    with running_stack(FakeInference(), tool_call_parser="hermes", reasoning_parser="qwen3") as stack:
        yield stack


def script(stack, text, reason=STOP, *, size=3, stop_string=""):
    """The router's next answers say ``text`` in pieces of some characters."""
    stack.fake.reset()
    response = inference_pb2.GenerateEvent
    pieces = [text[start:end] for start, end in pairwise([*range(0, len(text), size), len(text)])]
    finished = inference_pb2.Finished(reason=reason)
    if stop_string:
        finished.stop_string = stop_string
    stack.fake.script = [
        response(started=inference_pb2.Started(request_id="x", model=MODEL, prompt_tokens=1)),
        *[response(delta=inference_pb2.Delta(text=piece)) for piece in pieces],
        response(finished=finished),
    ]


def post(stack, **fields):
    return httpx.post(f"{stack.url}/v1/chat/completions", json={"model": MODEL, "messages": ASK, **fields}, timeout=20)


def whole(stack, **fields):
    """The choice of an answer that does not stream."""
    response = post(stack, **fields)
    assert response.status_code == 200, response.text
    (choice,) = ChatCompletion.model_validate_json(response.content, strict=True).choices
    return choice


def streamed(stack, **fields):
    """The chunks' deltas, and the finish reason; after a look at the form of each event."""
    events = [block for block in post(stack, stream=True, **fields).text.split("\n\n") if block.startswith("data: ")]
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]
    return [choice["delta"] for choice in choices], choices[-1]["finish_reason"]


def message_of(deltas):
    """(content, reasoning, calls) that deltas come to; of each call its name and arguments."""
    calls = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["id"].startswith("call_")
                assert call["type"] == "function"
                calls.append([call["function"]["name"], ""])
            assert call["index"] == len(calls) - 1
            calls[-1][1] += call["function"]["arguments"]
    content = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return content, reasoning, calls


def error_of(response, status):
    assert response.status_code == status, response.text
    return ErrorReply.model_validate_json(response.content, strict=True).error


def both(stack, **fields):
    """(content, reasoning, calls, finish reason) of the answer, the same with and without streaming."""
    choice = whole(stack, **fields)
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    deltas, reason = streamed(stack, **fields)
    assert message_of(deltas) == (message.content or "", message.reasoning_content or "", calls)
    assert reason == choice.finish_reason
    assert (message.content is None) == (bool(calls) and not message_of(deltas)[0])
    return message.content, message.reasoning_content, calls, reason


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_in_plain_json(stack, size):
    script(stack, CALL, size=size)
    assert both(stack, tools=TOOLS) == (None, None, [["weather", ROME]], "tool_calls")
    (told, _) = (request.chat.messages for request in stack.fake.requests)
    (turn,) = told
    assert turn.role == "user"
    assert turn.content.endswith("\n\nIs it warm in Rome?")
    assert json.dumps(PARAMETERS) in turn.content
    assert '"clock"' in turn.content
    assert stack.fake.requests[0].sampling.WhichOneof("constraint") is None


def test_reasoning_words_and_calls(tagged_stack):
    script(tagged_stack, f"<think>\nRome?\n</think>\n\nI look.\n{TAGGED}\n{TAGGED}")
    call = ["weather", ROME]
    assert both(tagged_stack, tools=TOOLS) == ("I look.", "Rome?", [call, call], "tool_calls")
    assert both(tagged_stack, tools=TOOLS, parallel_tool_calls=False) == ("I look.", "Rome?", [call], "tool_calls")
    assert "<tool_call>" in tagged_stack.fake.requests[0].chat.messages[0].content


def test_reasoning_without_tools(tagged_stack):
    script(tagged_stack, "<think>Hm.</think>Yes.")
    assert both(tagged_stack) == ("Yes.", "Hm.", [], "stop")
    script(tagged_stack, "<think>Hm.", LENGTH)
    assert both(tagged_stack) == ("", "Hm.", [], "length")


@pytest.mark.parametrize("n", [1, 2])
def test_tokens_of_reasoning_are_counted(tagged_stack, n):
    fake = tagged_stack.fake
    fake.reset()
    fake.words = ["<think>", "Hm", ".", "</think>", "\n\n", "Yes"]
    usage = post(tagged_stack, n=n).json()["usage"]
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (6 * n, {"reasoning_tokens": 4 * n})
    told = post(tagged_stack, n=n, stream=True, stream_options={"include_usage": True}).text.split("\n\n")[-3]
    assert json.loads(told.removeprefix("data: "))["usage"] == usage
    fake.words = fake.words[4:]
    assert post(tagged_stack, n=n).json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert all(request.output.token_bytes for request in fake.requests)


def test_what_a_grammar_binds_has_no_reasoning(tagged_stack):
    script(tagged_stack, '"red"')
    assert both(tagged_stack, response_format=COLOUR) == ('"red"', None, [], "stop")


def test_an_answer_in_words_stays_one(stack):
    script(stack, "It is warm. ")
    assert both(stack, tools=TOOLS, tool_choice="auto") == ("It is warm. ", None, [], "stop")


def test_without_a_choice_to_call_nothing_is_a_call(stack):
    script(stack, CALL)
    assert both(stack, tools=TOOLS, tool_choice="none") == (CALL, None, [], "stop")
    assert stack.fake.requests[0].chat.messages[0].content == "Is it warm in Rome?"


def test_a_named_choice_is_a_grammar(stack):
    script(stack, ROME)
    assert both(stack, tools=TOOLS, tool_choice=NAMED) == (None, None, [["weather", ROME]], "tool_calls")
    assert json.loads(stack.fake.requests[0].sampling.json_schema) == PARAMETERS
    script(stack, "{}")
    clock = {"type": "function", "function": {"name": "clock"}}
    assert both(stack, tools=TOOLS, tool_choice=clock)[2] == [["clock", "{}"]]


def test_a_required_choice_is_a_grammar(stack):
    script(stack, f"[{CALL}, {CALL}]")
    call = ["weather", ROME]
    assert both(stack, tools=TOOLS, tool_choice="required") == (None, None, [call, call], "tool_calls")
    schema = json.loads(stack.fake.requests[0].sampling.json_schema)
    assert (schema["minItems"], schema["maxItems"]) == (1, MAX_PARALLEL_CALLS)
    assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["weather", "clock"]
    script(stack, f"[{CALL}]")
    both(stack, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(stack.fake.requests[0].sampling.json_schema)["maxItems"] == 1


def test_a_call_cut_short_by_the_limit_ends_with_length(stack):
    script(stack, '{"city": "Ro', LENGTH)
    assert both(stack, tools=TOOLS, tool_choice=NAMED) == (None, None, [["weather", '{"city": "Ro']], "length")


@pytest.mark.parametrize("end", [{"reason": LENGTH}, {"stop_string": "x"}])
@pytest.mark.parametrize("size", [1, 1000])
def test_a_demanded_call_that_has_no_name_yet_is_none(stack, size, end):
    fields = {"tools": TOOLS, "tool_choice": "required"}
    reason = "length" if "reason" in end else "stop"
    script(stack, '[{"name": "wea', size=size, **end)
    assert both(stack, **fields) == ("", None, [], reason)
    script(stack, '[{"name": "weather", "parameters": {"ci', size=size, **end)
    assert both(stack, **fields) == (None, None, [["weather", '{"ci']], reason)
    script(stack, f'[{CALL}, {{"na', LENGTH, size=size)
    assert both(stack, **fields) == (None, None, [["weather", ROME]], "length")


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('{"town": "Rome"}', {"tools": TOOLS, "tool_choice": NAMED}),
        ("[]", {"tools": TOOLS, "tool_choice": "required"}),
        ('"blue"', {"response_format": COLOUR}),
        ('"red', {"response_format": COLOUR}),
        ("[1]", {"response_format": {"type": "json_object"}}),
        ("maybe", {"structured_outputs": {"choice": ["yes", "no"]}}),
        (
            '{"name": "weather", "parameters": {"town": 1}}',
            {"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]},
        ),
    ],
)
def test_output_that_breaks_its_promise_is_an_error(stack, text, fields):
    script(stack, text)
    error = error_of(post(stack, **fields), 500)
    assert (error.type, error.code) == ("server_error", "invalid_output")
    response = post(stack, stream=True, **fields)
    last = response.text.strip().split("\n\n")[-1].removeprefix("data: ")
    assert ErrorReply.model_validate_json(last, strict=True).error.code == "invalid_output"
    assert 'finish_reason":"' not in response.text
    # What a limit or the client's own stop string cuts is no broken promise.
    script(stack, text[: len(text) // 2], LENGTH)
    assert whole(stack, **fields).finish_reason == "length"
    script(stack, text[: len(text) // 2], stop_string="x")
    assert whole(stack, **fields).finish_reason == "stop"


def test_a_broken_promise_ends_what_else_runs(stack):
    fake = stack.fake
    for stream in (False, True):
        script(stack, "blue")
        fake.stays_open = True
        response = post(stack, stream=stream, n=2, response_format=COLOUR)
        assert "invalid_output" in response.text
        assert fake.cancelled.acquire(timeout=10)


def tool(**function):
    return [{"type": "function", "function": {"name": "f", **function}}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_what_no_grammar_holds_binds_strict_tools_alone(stack, choice):
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"pattern": "(?=x)"}},
    }
    script(stack, "[]")
    post(stack, tools=tool(parameters=parameters), tool_choice=choice)
    sent = stack.fake.requests[0].sampling.json_schema
    assert '"array"' in sent
    assert "uniqueItems" not in sent
    assert "pattern" not in sent
    error = error_of(post(stack, tools=tool(parameters=parameters, strict=True), tool_choice=choice), 400)
    assert error.param == "tools.0.function.parameters"
    assert "of f cannot be followed strictly: properties.a.uniqueItems is not supported" in error.message
    del parameters["properties"]["a"]
    error = error_of(post(stack, tools=tool(parameters=parameters, strict=True), tool_choice=choice), 400)
    assert error.param == "tools.0.function.parameters"
    assert "properties.b.pattern" in error.message
    assert "looks ahead" in error.message
    assert "$defs" not in error.message


def test_of_several_tools_the_one_is_named_that_no_grammar_holds(stack):
    parameters = {"properties": {"a": {"anyOf": [{"type": "null"}, {"items": {"if": {}}}]}}}
    tools = [WEATHER, *tool(parameters=parameters, strict=True)]
    error = error_of(post(stack, tools=tools, tool_choice="required"), 400)
    assert error.param == "tools.1.function.parameters"
    assert "properties.a.anyOf.1.items.if" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [WEATHER, {"type": "web_search"}]}, "tools.1.type"),
        ({"tools": tool(name="a b")}, "tools.0.function.name"),
        ({"tools": tool(parameters=[])}, "tools.0.function.parameters"),
        ({"tools": tool(parameters={"type": "array"})}, "tools.0.function.parameters"),
        ({"tools": tool(parameters={"properties": 5}, strict=True)}, "tools.0.function.parameters"),
        ({"tools": [WEATHER, *tool(parameters={"properties": {"a": {"type": "colour"}}})], "tool_choice": "required"},
         "tools.1.function.parameters"),
        ({"tools": [WEATHER, *tool(parameters={"$ref": "#/$defs/gone"})], "tool_choice": "required"},
         "tools.1.function.parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
        ({"tools": [CLOCK] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": tool(description="x" * MAX_TOOLS_CHARS)}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "function": {"name": "clock"}}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": TOOLS, "response_format": COLOUR}, "tools"),
        ({"tools": TOOLS, "tool_choice": NAMED, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format.json_schema.schema"),
        ({"guided_json": "["}, "guided_json"),
    ],
)  # fmt: skip
def test_bad_tools(stack, fields, param):
    stack.fake.reset()
    error = error_of(post(stack, **fields), 400)
    assert (error.type, error.param) == ("invalid_request_error", param)
    assert param in error.message
    assert stack.fake.requests == []


def test_calls_and_their_results_are_told_in_the_models_format(tagged_stack):
    script(tagged_stack, "Yes.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ROME}}
    second = {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": ""}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call, second]},
        {"role": "tool", "tool_call_id": "c1", "content": "30 C"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "noon"}]},
    ]
    assert both(tagged_stack, messages=messages, tools=TOOLS)[0] == "Yes."
    system, user, calls, results = tagged_stack.fake.requests[0].chat.messages
    assert system.role == "system"
    assert system.content.endswith("\n\nBe brief.")
    assert user.content == "Is it warm in Rome?"
    assert (calls.role, calls.content.count("<tool_call>"), TAGGED in calls.content) == ("assistant", 2, True)
    assert (results.role, results.content) == ("user", "weather returned:\n30 C\n\nclock returned:\nnoon")


def test_log_probabilities_of_a_call_are_all_told(tagged_stack):
    script(tagged_stack, TAGGED)
    for event in tagged_stack.fake.script:
        if event.HasField("delta"):
            event.delta.logprobs.logprobs.append(-1.0)
            event.delta.token_bytes.append(event.delta.text.encode())
    tokens = [entry.token for entry in whole(tagged_stack, tools=TOOLS, logprobs=True).logprobs.content]
    assert "".join(tokens) == TAGGED
    events = post(tagged_stack, stream=True, tools=TOOLS, logprobs=True).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry["token"] for logprobs in told if logprobs for entry in logprobs["content"]] == tokens


def test_what_the_official_client_makes_of_it(stack):
    script(stack, f"[{CALL}, {CALL}]")
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    with client, client.chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required") as s:
        s.until_done()
        (choice,) = s.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert [call.function.arguments for call in choice.message.tool_calls] == [ROME, ROME]
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        (choice,) = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "weather"]

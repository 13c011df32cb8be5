"""The Responses API over HTTP, before a scripted router: what the official client makes of it, and what is refused."""

import json

import grpc
import httpx
import openai
import pytest
from openai.types.responses import Response

from protos import inference_pb2, sampling_pb2
from tests.integration.fake_inference import MODEL, Failure, FakeInference, bad_request, running_stack

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "Now", "parameters": PARAMETERS}
ROME = '{"city": "Rome"}'
CALL = f'{{"name": "weather", "parameters": {ROME}}}'


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference()) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def fake(stack):
    stack.fake.reset()
    return stack.fake


def post(stack, **fields):
    return httpx.post(f"{stack.url}/v1/responses", json={"model": MODEL, "input": "Hello there", **fields}, timeout=20)


def turns(fake):
    """What the model is told."""
    return [(turn.role, turn.content) for turn in fake.requests[-1].chat.messages]


def test_a_text(client, fake):
    fake.cached_tokens = 2
    response = client.responses.create(
        model=MODEL, input="Hello there", instructions="Be brief.", max_output_tokens=3, temperature=0.5, top_p=0.9,
        metadata={"a": "b"}, user="ann",
    )  # fmt: skip
    assert turns(fake) == [("system", "Be brief."), ("user", "Hello there")]
    sent = fake.requests[0]
    assert (sent.stopping.max_tokens, sent.sampling.temperature, sent.request_id) == (3, 0.5, response.id)
    assert sent.sampling.top_p == pytest.approx(0.9)
    assert sent.output.final_only
    assert response.output_text == "w0 w1 w2 "
    assert response.id.startswith("resp_")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (6, 3, 9)
    assert usage.input_tokens_details.cached_tokens == 2
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)


def test_a_model_that_stops_by_itself_completes(client, fake):
    fake.words, fake.stop_string = ["Yes"], "x"
    response = client.responses.create(model=MODEL, input="Hello there")
    assert (response.status, response.output[0].status, response.incomplete_details) == ("completed", "completed", None)


def test_a_stream(client, fake):
    fake.words = ["Yes", ", ", "sir"]
    events = list(client.responses.create(model=MODEL, input="Hello there", stream=True))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 3,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress"
    whole = events[-1].response
    assert whole.output_text == "Yes, sir"
    assert whole.usage.output_tokens == 3
    assert len({event.response.id for event in (*events[:2], events[-1])}) == 1


def test_the_names_of_events_are_their_types(stack, fake):
    blocks = post(stack, stream=True).text.strip().split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert "[DONE]" not in blocks[-1]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_of_a_function(client, fake, streamed):
    fake.words, fake.stop_string = list(CALL), "x"
    fields = {"model": MODEL, "input": "Warm?", "tools": [{**WEATHER, "strict": False}]}
    if streamed:
        with client.responses.stream(**fields) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.create(**fields)
    (call,) = response.output
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", ROME)
    assert call.call_id.startswith("call_")
    assert response.tools[0].name == "weather"
    told = fake.requests[-1].chat.messages[0].content
    assert json.dumps(PARAMETERS) in told


def test_a_demanded_function_is_a_grammar(stack, fake):
    fake.words = [ROME]
    response = post(stack, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert response.json()["output"][0]["arguments"] == ROME
    assert json.loads(fake.requests[0].sampling.json_schema) == PARAMETERS


def test_a_conversation_goes_on_with_what_came_back(client, fake):
    fake.words = list(CALL)
    tools = [{**WEATHER, "strict": False}]
    conversation = [{"role": "user", "content": [{"type": "input_text", "text": "Warm?"}]}]
    first = client.responses.create(model=MODEL, input=conversation, tools=tools)
    conversation += [item.model_dump(exclude_none=True) for item in first.output]
    conversation += [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "30 C"},
    ]
    fake.words = ["Yes."]
    second = client.responses.create(model=MODEL, input=conversation, tools=tools)
    assert second.output_text == "Yes."
    user, called, result = fake.requests[-1].chat.messages
    assert user.content.endswith("\n\nWarm?")
    assert (called.role, called.content) == ("assistant", CALL)
    assert result.content == "weather returned:\n30 C"
    conversation += [item.model_dump(exclude_none=True) for item in second.output]
    conversation += [{"role": "user", "content": "Thanks"}]
    client.responses.create(model=MODEL, input=conversation, tools=tools)
    assert turns(fake)[-2:] == [("assistant", "Yes."), ("user", "Thanks")]


def test_a_form_of_the_text_is_a_grammar(stack, fake):
    fake.words = ['"red"']
    schema = {"enum": ["red"]}
    response = post(stack, text={"format": {"type": "json_schema", "name": "c", "schema": schema, "strict": True}})
    assert response.status_code == 200, response.text
    assert json.loads(fake.requests[0].sampling.json_schema) == schema
    assert response.json()["text"]["format"]["schema"] == schema


def test_reasoning_is_an_item_of_its_own(fake):
    with running_stack(fake, reasoning_parser="qwen3") as stack:
        fake.words = ["<think>", "Hm.", "</think>", "Yes."]
        reply = Response.model_validate(post(stack).json())
        assert [item.type for item in reply.output] == ["reasoning", "message"]
        assert reply.output[0].content[0].text == "Hm."
        assert reply.output_text == "Yes."
        streamed = post(stack, stream=True).text
        assert "response.reasoning_text.delta" in streamed


def test_log_probabilities(stack, fake):
    response = inference_pb2.GenerateEvent
    delta = inference_pb2.Delta(text="Yes", token_bytes=[b"Yes"], top_token_bytes=[])
    delta.logprobs.logprobs.append(-0.5)
    fake.script = [
        response(started=inference_pb2.Started(request_id="x", model=MODEL, prompt_tokens=1)),
        response(delta=delta),
        response(finished=inference_pb2.Finished(reason=sampling_pb2.FINISH_REASON_STOP)),
    ]
    reply = Response.model_validate(post(stack, include=["message.output_text.logprobs"]).json())
    (token,) = reply.output[0].content[0].logprobs
    assert (token.token, token.logprob) == ("Yes", -0.5)
    assert fake.requests[0].output.logprobs == 0
    events = [
        json.loads(line[6:]) for line in post(stack, top_logprobs=2, stream=True).text.split("\n") if "data" in line
    ]
    (told,) = (event["logprobs"] for event in events if event["type"] == "response.output_text.delta")
    assert [entry["token"] for entry in told] == ["Yes"]


def test_what_has_no_effect_is_named(stack, fake):
    response = post(
        stack, store=True, include=["reasoning.encrypted_content"], text={"verbosity": "low"},
        reasoning={"effort": "low"}, stream_options={"include_obfuscation": False}, max_tool_calls=3, top_k=5,
        tools=[{**WEATHER, "defer_loading": True}],
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert set(response.headers["x-quire-ignored-fields"].split(", ")) == {
        "store", "include.reasoning.encrypted_content", "text.verbosity", "reasoning.effort", "stream_options",
        "max_tool_calls", "tools.defer_loading",
    }  # fmt: skip
    assert response.json()["store"] is False
    assert fake.requests[0].sampling.top_k == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": ["x"]}, "input.0"),
        ({"instructions": "a", "input": [{"role": "user", "content": "x"},
          {"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input.1"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3.5}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_k": "x"}, "top_k"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name"),
        ({"tools": [{**WEATHER, "parameters": {"type": "array"}}]}, "tools.0.parameters"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}, "text.format.schema"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "30 C"}]}, "input.0.call_id"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_as_the_client_wrote_it(stack, fake, fields, param):
    response = post(stack, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert fake.requests == []


def test_errors_of_the_router_name_the_clients_fields(stack, fake):
    fake.refusal = Failure(grpc.StatusCode.INVALID_ARGUMENT, "too long", (bad_request("chat.messages[1].content"),))
    error = post(stack, instructions="x", max_output_tokens=3).json()["error"]
    assert error["param"] == "input.content"
    fake.refusal = Failure(grpc.StatusCode.INVALID_ARGUMENT, "too many", (bad_request("stopping.max_tokens"),))
    assert post(stack, max_output_tokens=3).json()["error"]["param"] == "max_output_tokens"


def test_a_stream_that_breaks_says_so(client, fake):
    fake.failure_after_tokens = (2, Failure(grpc.StatusCode.UNAVAILABLE, "gone"))
    events = list(client.responses.create(model=MODEL, input="Hello there", stream=True))
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "server_error")
    (item,) = events[-1].response.output
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (item.status, item.content[0].text) == ("incomplete", text)
    assert text
    assert not any(event.type == "response.output_item.done" for event in events)


def test_a_client_that_leaves_ends_the_request(stack, fake):
    fake.delay_token = 0.05
    body = {"model": MODEL, "input": "Hello there", "stream": True, "max_output_tokens": 500}
    with httpx.stream("POST", f"{stack.url}/v1/responses", json=body, timeout=20) as response:
        next(response.iter_lines())
    assert fake.cancelled.acquire(timeout=10)

"""Bodies become calls that say the same, and the router's names of fields become the client's."""

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.translate import chat_requests, completion_requests, param_names, tokenize_request

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields):
    (request,) = chat_requests(ChatBody.model_validate({"model": "m", "messages": HELLO, **fields}), "id-1")
    return request


def completions(**fields):
    return completion_requests(CompletionBody.model_validate({"model": "m", "prompt": "Hello", **fields}), "id-1")


def test_what_is_absent_stays_absent():
    """The router knows the defaults; a field that nobody set must not arrive as a zero."""
    request = chat()
    assert MessageToDict(request) == {
        "requestId": "id-1",
        "model": "m",
        "chat": {"messages": [{"role": "user", "content": "Hello"}]},
        "sampling": {},
        "stopping": {},
        "output": {"finalOnly": True},
    }
    nulls = dict.fromkeys(
        ("temperature", "top_p", "n", "stop", "seed", "stream", "max_tokens", "max_completion_tokens", "top_k", "min_p",
         "stop_token_ids", "ignore_eos", "cache_salt", "add_generation_prompt", "include_stop_str_in_output", "tools")
    )  # fmt: skip
    assert chat(**nulls) == request


def test_zeros_are_zeros():
    request = chat(temperature=0, top_k=0, min_p=0, seed=0)
    for name in ("temperature", "top_k", "min_p", "seed"):
        assert request.sampling.HasField(name)
        assert getattr(request.sampling, name) == 0


def test_every_field_arrives():
    request = chat(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=9, n=3, max_tokens=11, stop=["a", "b"],
        stop_token_ids=[4, 5], ignore_eos=True, include_stop_str_in_output=True, cache_salt="salt", stream=True,
        add_generation_prompt=False, presence_penalty=-0.5, frequency_penalty=0.25, repetition_penalty=1.5,
        logit_bias={"17": -100, "0": 2.5}, allowed_token_ids=[17, 0], bad_words=["no", "not this"], min_tokens=3,
        skip_reading_prefix_cache=True, priority=-4,
    )  # fmt: skip
    sampling, stopping = request.sampling, request.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5, 0.25, 7, 0.125, 9,
    )  # fmt: skip
    assert (stopping.max_tokens, list(stopping.stop), list(stopping.stop_token_ids)) == (11, ["a", "b"], [4, 5])
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-0.5, 0.25, 1.5)
    assert dict(sampling.logit_bias) == {17: -100, 0: 2.5}
    assert list(sampling.allowed_token_ids) == [17, 0]
    assert (list(stopping.bad_words), stopping.min_tokens) == (["no", "not this"], 3)
    assert stopping.ignore_eos
    assert stopping.include_stop_str_in_output
    assert (request.n, request.cache_salt, request.output.final_only) == (3, "salt", False)
    assert (request.skip_reading_prefix_cache, request.priority) == (True, -4)
    assert request.chat.HasField("add_generation_prompt")
    assert not request.chat.add_generation_prompt


@given(st.integers(-(2**63), 2**64 - 1))
def test_any_seed_fits_and_different_signs_stay_different(seed):
    sent = chat(seed=seed).sampling.seed
    assert 0 <= sent < 2**64
    assert sent == seed or (seed < 0 and sent == seed + 2**64)


def test_top_k_of_minus_one_is_off():
    assert chat(top_k=-1).sampling.top_k == 0


def test_a_single_stop_string_is_a_list_of_one():
    assert list(chat(stop="end").stopping.stop) == ["end"]


def test_the_newer_name_of_max_tokens_wins():
    assert chat(max_tokens=3, max_completion_tokens=5).stopping.max_tokens == 5
    assert chat(max_tokens=3).stopping.max_tokens == 3
    assert not chat().stopping.HasField("max_tokens")


def test_text_completions_have_the_documented_default_length():
    assert completions()[0].stopping.max_tokens == 16


def test_messages_keep_order_names_and_parts():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": ""},
    ]
    turns = chat(messages=messages).chat.messages
    assert [(turn.role, turn.content) for turn in turns] == [("system", "Be brief."), ("user", "ab"), ("assistant", "")]
    assert [turn.HasField("name") for turn in turns] == [False, True, False]


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("one", ["one"]),
        ("", [""]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[0]], [[0]]),
    ],
)
def test_each_prompt_is_one_call(prompt, sent):
    requests = completions(prompt=prompt)
    got = [
        request.text if request.WhichOneof("prompt") == "text" else list(request.token_ids.ids) for request in requests
    ]
    assert got == sent
    ids = [request.request_id for request in requests]
    assert ids == (["id-1"] if len(sent) == 1 else [f"id-1-{index}" for index in range(len(sent))])


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("stopping.max_tokens", "max_completion_tokens"),
        ("stopping.stop[2]", "stop.2"),
        ("sampling.top_p", "top_p"),
        ("sampling", "sampling"),
        ("chat", "messages"),
        ("chat.messages[0].role", "messages.0.role"),
        ("model", "model"),
        ("n", "n"),
    ],
)
def test_fields_of_chat_are_named_as_the_client_knows_them(field, param):
    body = ChatBody.model_validate({"model": "m", "messages": HELLO, "max_completion_tokens": 5})
    assert param_names(body)(field) == param


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("stopping.max_tokens", "max_tokens"),
        ("text", "prompt"),
        ("token_ids.ids[3]", "prompt.3"),
        ("token_ids", "prompt"),
    ],
)
def test_fields_of_completions_are_named_as_the_client_knows_them(field, param):
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", "max_tokens": 5})
    assert param_names(body)(field) == param


def test_fields_of_detokenize_are_named_as_the_client_knows_them():
    assert param_names(DetokenizeBody(model="m", tokens=[1]))("token_ids[0]") == "tokens.0"


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": HELLO}])
def test_tokenize_wants_exactly_one_input(fields):
    with pytest.raises(ApiError) as caught:
        tokenize_request(TokenizeBody.model_validate({"model": "m", **fields}))
    assert caught.value.status == 400


def test_tokenize_passes_its_options_on():
    request = tokenize_request(TokenizeBody(model="m", prompt="", add_special_tokens=False))
    assert request.WhichOneof("prompt") == "text"
    assert request.HasField("add_special_tokens")
    assert not request.add_special_tokens
    request = tokenize_request(TokenizeBody.model_validate({"model": "m", "messages": HELLO}))
    assert request.chat.messages[0].content == "Hello"
    assert not request.HasField("add_special_tokens")


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "expected", "param"),
    [
        ({"response_format": {"type": "json_object"}}, {"jsonObject": True}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            {"jsonSchema": '{"type": "object"}'},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"jsonSchema": '{"type": "object"}'}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{}"}}, {"jsonSchema": "{}"}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, {"jsonObject": True}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            {"choices": {"texts": ["a", "b"]}},
            "structured_outputs.choice",
        ),
        ({"structured_outputs": {"grammar": "start: x"}}, {"grammar": "start: x"}, "structured_outputs.grammar"),
        ({"guided_json": SCHEMA}, {"jsonSchema": '{"type": "object"}'}, "guided_json"),
        ({"guided_regex": "a+"}, {"regex": "a+"}, "guided_regex"),
        ({"guided_choice": ["a"]}, {"choices": {"texts": ["a"]}}, "guided_choice"),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}, "guided_grammar"),
        ({"response_format": {"type": "text"}}, {}, None),
        ({"structured_outputs": {"json_object": False}}, {}, None),
    ],
)
def test_constraints_arrive_and_errors_find_their_way_back(fields, expected, param):
    (completion,) = completions(**fields)
    assert MessageToDict(chat(**fields).sampling) == MessageToDict(completion.sampling) == expected
    if param is not None:
        body = ChatBody.model_validate({"model": "m", "messages": HELLO, **fields})
        field = chat(**fields).sampling.WhichOneof("constraint")
        assert param_names(body)(f"sampling.{field}") == param
        assert param_names(body)("sampling.temperature") == "temperature"
    if "choice" in str(param):
        assert param_names(body)("sampling.choices.texts[1]") == f"{param}.1"


def test_two_constraints_are_one_too_many():
    with pytest.raises(ApiError, match="only one of response_format and guided_regex"):
        chat(response_format={"type": "json_object"}, guided_regex="a")

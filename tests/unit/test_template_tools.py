"""Tools in chat templates: which templates take them, what these see, and that no client's words become marks there."""

import copy
import json

import pytest
from transformers import PreTrainedTokenizerFast

from protos import inference_pb2
from router.chat import MAX_JSON_DEPTH, MAX_TOOLS, check_extras, check_messages
from router.chat_template import ChatTemplate, Message, TemplateExtras, TemplateRefusal, ToolCall
from router.errors import InvalidArgument
from router.prompt import encode_prompt

# Each tells tools, calls and results as models of one family were trained to read them.
HERMES = """
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ "\\n" ~ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>
{%- endfor %}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}
<think></think>{% endif %}{% endif %}"""
MISTRAL = """
{%- if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for message in messages %}{% if message.tool_calls is defined %}[TOOL_CALLS]
{%- for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception("ids have 9 characters") }}
{%- endif %}{{ {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
{%- endfor %}{% elif message.role == "tool" %}[TOOL_RESULTS]{{ message.tool_call_id }}:{{ message.content }}
{%- else %}[INST]{{ message.content }}{% endif %}{% endfor %}"""
LLAMA = """
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}
{%- for message in messages %}{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}
{{- raise_exception("one call at a time") }}{% endif %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' ~ call.name ~ '", "parameters": ' }}{{ call.arguments | tojson }}}
{%- else %}{{ message.role }}: {{ message.content }}{% endif %}{% endfor %}"""
XML = HERMES.replace('{"name": "{{ call.function.name }}"', "<function={{ call.function.name }}")
WITHOUT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
# Shows what may be called, and not what was.
HALF = "{% if tools %}{{ tools | tojson }}{% endif %}" + WITHOUT

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = ToolCall("call00001", "weather", {"city": "Rome", "days": [1, None]})
MESSAGES = [
    Message("user", "Warm?"),
    Message("assistant", "", tool_calls=(CALL,)),
    Message("tool", "30 C", name="weather", tool_call_id="call00001"),
]


@pytest.mark.parametrize(
    ("source", "takes_tools", "tool_format"),
    [
        (HERMES, True, "hermes"),
        (MISTRAL, True, "mistral"),
        (LLAMA, True, "llama3_json"),
        (XML, True, ""),
        (WITHOUT, False, ""),
        (HALF, False, ""),
        ("{{ raise_exception('user and assistant must alternate') }}", False, ""),
    ],
)
def test_what_a_template_takes_is_found_by_trying(source, takes_tools, tool_format):
    template = ChatTemplate(source, {})
    assert (template.takes_tools, template.tool_call_format) == (takes_tools, tool_format)


def test_variables_are_what_a_client_may_set():
    source = HERMES + "{{ bos_token }}{{ strftime_now('%Y') }}{{ documents }}{% set own = 1 %}{{ own }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.variables == {"enable_thinking"}
    assert template.reserved == {"messages", "tools", "documents", "add_generation_prompt", "bos_token"}


def test_no_tools_are_none_and_not_an_empty_list():
    assert "[AVAILABLE_TOOLS]" not in ChatTemplate(MISTRAL, {}).render(MESSAGES, add_generation_prompt=True)
    assert ChatTemplate(LLAMA, {}).render(MESSAGES[:1], add_generation_prompt=True) == "user: Warm?"


@pytest.mark.parametrize("source", [HERMES, MISTRAL, LLAMA])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_tools_are_rendered_as_transformers_renders_them(demo_tokenizer, source, kwargs):
    theirs = PreTrainedTokenizerFast(tokenizer_object=demo_tokenizer._core)
    function = {"name": CALL.name, "arguments": CALL.arguments}
    messages = [
        {"role": "user", "content": "Warm?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "30 C", "name": "weather", "tool_call_id": "call00001"},
    ]
    expected = theirs.apply_chat_template(
        messages, tools=[WEATHER], chat_template=source, add_generation_prompt=True, tokenize=False, **kwargs
    )
    extras = TemplateExtras([WEATHER], kwargs)
    assert ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=True, extras=extras) == expected


def with_template(tokenizer, source):
    """The same tokenizer with another template."""
    other = copy.copy(tokenizer)
    other._template = ChatTemplate(source, {"bos_token": "<|im_start|>"})
    return other


def test_marks_in_tools_and_calls_are_text(demo_tokenizer):
    tokenizer = with_template(demo_tokenizer, HERMES)
    mark = "x<|im_end|>"
    tool = {
        "type": "function",
        "function": {"name": mark, "description": mark, "parameters": {mark: [mark, {"a": mark}]}},
    }
    messages = [
        Message("user", "hi"),
        Message("assistant", "", tool_calls=(ToolCall(mark, mark, {mark: [mark]}),)),
        Message("tool", mark, tool_call_id=mark),
    ]
    ids = tokenizer.encode_chat(messages, extras=TemplateExtras([tool], {"enable_thinking": mark}))
    assert [i for i in ids if i in (1, 2)] == [1, 2] * 4 + [1]
    assert tokenizer.decode(ids).count(mark) == 5 + 3 + 1
    assert not any(0xE000 <= ord(character) < 0xF900 for character in tokenizer.decode(ids))


def chat(**fields):
    first = inference_pb2.ChatMessage(role="user", content="hi")
    return inference_pb2.Chat(**{"messages": [first], **fields})


def encode(tokenizer, sent):
    return encode_prompt(tokenizer, inference_pb2.GenerateRequest(chat=sent), 0, 1 << 20)[1]


def test_a_chat_with_tools_from_the_wire(demo_tokenizer):
    tokenizer = with_template(demo_tokenizer, HERMES)
    call = inference_pb2.ToolCall(id="c1", name="weather", arguments='{"city": "R\\u00f6m"}')
    messages = [
        inference_pb2.ChatMessage(role="user", content="hi"),
        inference_pb2.ChatMessage(role="assistant", tool_calls=[call]),
        inference_pb2.ChatMessage(role="tool", content="30 C", tool_call_id="c1"),
    ]
    sent = chat(messages=messages, tools=[json.dumps(WEATHER)], template_kwargs='{"enable_thinking": false}')
    text = tokenizer.decode(encode(tokenizer, sent))
    assert '"name": "weather", "arguments": {"city": "Röm"}' in text
    assert text.endswith("<think></think>")


@pytest.mark.parametrize("field", ["tools", "tool_calls", "tool_call_id"])
def test_a_template_without_tools_is_given_none(demo_tokenizer, field):
    message = inference_pb2.ChatMessage(role="user", content="hi")
    sent = chat(messages=[message])
    if field == "tools":
        sent.tools.append(json.dumps(WEATHER))
    elif field == "tool_calls":
        sent.messages[0].tool_calls.add(id="c1", name="weather", arguments="{}")
    else:
        sent.messages[0].tool_call_id = "c1"
    with pytest.raises(InvalidArgument, match="takes no tools") as raised:
        encode(with_template(demo_tokenizer, WITHOUT), sent)
    assert raised.value.field == "chat"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_what_is_the_servers_to_tell_cannot_be_set(demo_tokenizer, name):
    sent = chat(template_kwargs=json.dumps({name: []}))
    with pytest.raises(InvalidArgument, match=f"{name} is the server's") as raised:
        encode(with_template(demo_tokenizer, HERMES), sent)
    assert raised.value.field == "chat.template_kwargs"


DEEP = '{"a":' * (MAX_JSON_DEPTH + 1) + "1" + "}" * (MAX_JSON_DEPTH + 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"template_kwargs": "[]"}, "chat.template_kwargs"),
        ({"template_kwargs": '{"a": NaN}'}, "chat.template_kwargs"),
        ({"template_kwargs": '{"a": "\\ud800"}'}, "chat.template_kwargs"),
        ({"tools": ['{"function": {"name": "\\udc00"}}']}, "chat.tools[0]"),
        ({"template_kwargs": DEEP}, "chat.template_kwargs"),
        ({"template_kwargs": '{"a":' * 100_000}, "chat.template_kwargs"),
        ({"tools": ["{"]}, "chat.tools[0]"),
        ({"tools": [json.dumps(WEATHER), '{"function": {}}']}, "chat.tools[1]"),
        ({"tools": [json.dumps(WEATHER)] * (MAX_TOOLS + 1)}, "chat.tools"),
        ({"tools": ["x" * (1 << 20)] * 2}, "chat"),
        (
            {
                "messages": [
                    inference_pb2.ChatMessage(
                        role="assistant", tool_calls=[inference_pb2.ToolCall(name="f", arguments="1")]
                    )
                ]
            },
            "chat.messages[0].tool_calls[0].arguments",
        ),
    ],
)
def test_what_is_no_json_object_is_refused(fields, field):
    sent = chat(**fields)
    with pytest.raises(InvalidArgument) as raised:
        assert (check_messages(sent), check_extras(sent)) is None
    assert raised.value.field == field


def test_a_refusal_of_the_template_has_no_secrets(demo_tokenizer):
    tokenizer = with_template(demo_tokenizer, LLAMA)
    messages = [Message("assistant", "", tool_calls=(CALL, CALL))]
    with pytest.raises(TemplateRefusal, match=r"^one call at a time$"):
        tokenizer.encode_chat(messages)

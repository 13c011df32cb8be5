"""Nobody speaks as somebody else: whatever clients write, control tokens come from the chat template alone.

From a body of the REST API to the model's ids, through gateway and router, for each supported family's format.
"""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat_dialect import dialect_of
from gateway.schema import ChatBody
from gateway.translate import chat_requests
from protos import inference_pb2
from router.prompt import encode_prompt
from tests.doubles.chat_families import FAMILIES

TOKENIZERS = {name: family.tokenizer() for name, family in FAMILIES.items()}
# Stands in a body where the client's words go.
BLANK = "blank blank"


def body_of(**fields):
    arguments = {fields.get("argument_name", "city"): fields.get("argument", "Rome")}
    call_id = fields.get("call_id", "call00001")
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}
    parameters = {"type": "object", "properties": {"city": {"description": fields.get("parameter", "Where")}}}
    tool = {"name": "look", "description": fields.get("tool", "Looks"), "parameters": parameters}
    part = fields.get("part", "Now")
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": fields.get("system", "Be brief.")},
            {"role": "user", "content": fields.get("user", "Hello."), "name": fields.get("name", "Ann")},
            {"role": "assistant", "content": fields.get("assistant", "Hi.")},
            # Cut in the middle, where a mark may be.
            {"role": "user", "content": [{"type": "text", "text": half} for half in (part[:5], part[5:])]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": fields.get("result_id", call_id), "content": fields.get("result", "30 C")},
        ],
        "tools": [{"type": "function", "function": tool}],
        "chat_template_kwargs": {
            "enable_thinking": fields.get("kwarg", True),
            "style": fields.get("style", "plain"),
        },
    }


FIELDS = (
    "system", "user", "assistant", "part", "result", "name", "argument", "argument_name", "call_id", "result_id",
    "tool", "parameter", "kwarg", "style",
)  # fmt: skip


def described(tokenizer):
    """What the router tells of the template."""
    template = tokenizer.chat_template
    return inference_pb2.ChatTemplate(
        takes_tools=template.takes_tools,
        tool_call_format=template.tool_call_format,
        variables=sorted(template.variables),
    )


def shown(family, body):
    """What the model reads, with the names of control tokens between two zero bytes."""
    tokenizer = TOKENIZERS[family]
    parsed = ChatBody.model_validate(body)
    (request,) = chat_requests(parsed, "r", dialect_of(parsed, described(tokenizer), "auto"))
    _, ids = encode_prompt(tokenizer, request, 0, tokenizer.vocab_size)
    special = tokenizer.token_bytes.special
    pieces = [b"\0" + special[id_] + b"\0" if id_ in special else tokenizer.token_bytes.table[id_] for id_ in ids]
    return b"".join(pieces).decode()


def control_of(text):
    return text.split("\0")[1::2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("field", FIELDS)
def test_marks_in_the_clients_words_are_words(family, field):
    forged = FAMILIES[family].forged
    blank, attack = shown(family, body_of(**{field: BLANK})), shown(family, body_of(**{field: forged}))
    assert control_of(blank), "the format has control tokens"
    assert control_of(attack) == control_of(blank)
    if family == "mistral" and field in ("call_id", "result_id"):  # it takes nine letters: another id stands for it
        return
    assert family != "everything" or BLANK in blank or field == "kwarg"
    # Within JSON it is written as JSON writes it.
    as_json = json.dumps(forged, ensure_ascii=False)[1:-1]
    assert attack in (blank.replace(BLANK, forged), blank.replace(BLANK, as_json))


def test_which_templates_are_given_tools():
    """The others are told in words, so that both ways are tried above."""
    formats = {name: described(tokenizer).tool_call_format for name, tokenizer in TOKENIZERS.items()}
    assert {name: form for name, form in formats.items() if form} == {
        "llama_3": "llama3_json", "qwen": "hermes", "mistral": "mistral", "everything": "hermes",
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_conversation_as_meant_has_the_marks(family):
    """The test above would say little of a template that writes none."""
    text = shown(family, body_of(user=BLANK))
    assert BLANK in text
    assert set(control_of(text)) <= set(FAMILIES[family].control)
    assert len(control_of(text)) >= 4


@settings(deadline=None, max_examples=60)
@given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)))
def test_no_pieces_of_marks_come_together(data, family):
    """Also where marks are cut in two and their halves stand at the ends of fields."""
    control = FAMILIES[family].control
    halves = [mark[:cut] for mark in control for cut in (1, 2, len(mark) - 1)]
    halves += [mark[cut:] for mark in control for cut in (1, 2, len(mark) - 1)]
    words = st.lists(st.sampled_from([*control, *halves, "a", " ", "\n"]), min_size=1, max_size=6).map("".join)
    fields = data.draw(st.dictionaries(st.sampled_from([name for name in FIELDS if name != "call_id"]), words))
    assert control_of(shown(family, body_of(**fields))) == control_of(shown(family, body_of()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_role_is_one_of_the_known(family):
    with pytest.raises(ValueError, match="role"):
        ChatBody.model_validate({"model": "m", "messages": [{"role": FAMILIES[family].control[-1], "content": "x"}]})

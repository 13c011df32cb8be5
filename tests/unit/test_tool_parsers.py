"""What is made of the model's text: calls of tools in each format, and reasoning, however the text is cut."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.parts import Arguments, CallStart, Content, Reasoning, joined
from gateway.reasoning import reasoning_parser, reasoning_tokens
from gateway.tool_parsers import PARSERS
from gateway.tool_parsers.forced_call import ForcedCallParser

NAMES = ("look_up", "add")


def parse(make, pieces):
    parser = make()
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined(parts + parser.finish())


def read(name, text, **options):
    return parse(lambda: PARSERS[name](NAMES, **options), [text])


def call(name, arguments):
    return [CallStart(name), Arguments(arguments)]


LOOK_UP = call("look_up", '{"q": "a }\\" b", "n": [1, {"x": 2}]}')
LOOK_UP_JSON = '{"name": "look_up", "arguments": {"q": "a }\\" b", "n": [1, {"x": 2}]}}'
ADD = call("add", '{"a":1}')
ADD_JSON = '{"name":"add","parameters":{"a":1}}'

CASES = {
    "hermes": [
        (f"Let me see.\n<tool_call>\n{LOOK_UP_JSON}\n</tool_call>", [Content("Let me see."), *LOOK_UP]),
        (f"<tool_call>{ADD_JSON}</tool_call>\n<tool_call>{LOOK_UP_JSON}</tool_call>\n", ADD + LOOK_UP),
        (f"<tool_call>{ADD_JSON}\n<tool_call>{LOOK_UP_JSON}</tool_call>", ADD + LOOK_UP),
        (f"<tool_call>{ADD_JSON}</tool_call>\nDone.", [*ADD, Content("\nDone.")]),
        ("a < b </tool_call> <tool_", [Content("a < b </tool_call> <tool_")]),
        ("<tool_call>no</tool_call>", [Content("<tool_call>no</tool_call>")]),
        (f"<tool_call><tool_call>{ADD_JSON}</tool_call>", [Content("<tool_call>"), *ADD]),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "add"', None),
        (ADD_JSON, [Content(ADD_JSON)]),
        ('<tool_call>{"name": "add", "arguments": {"a": ', call("add", '{"a": ')),
        ("Hello.\n\n", [Content("Hello.\n\n")]),
    ],
    "llama3_json": [
        (ADD_JSON, ADD),
        (f"<|python_tag|>{ADD_JSON}; {LOOK_UP_JSON}", ADD + LOOK_UP),
        (f"\n[{ADD_JSON}, {LOOK_UP_JSON}]", ADD + LOOK_UP),
        (f"{ADD_JSON}\n{LOOK_UP_JSON} and more", [*ADD, *LOOK_UP, Content("and more")]),
        ('{"arguments": {"a":1}, "name": "add"}', ADD),
        ('{"id": 5, "name": "add", "arguments": "{\\"a\\":1}"}', ADD),
        ('{"name": "add"}', call("add", "{}")),
        ('{"name": "add", "arguments": null}', call("add", "{}")),
        ('{"name": "add", "arguments": 5}', None),
        ('{"name": "Paris", "size": 5}', None),
        ('[{"name": "Paris"}]', None),
        (f"I say {ADD_JSON}", None),
        ("<|python_ {}", None),
        (" [1, 2]\n", None),
        ("", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS][{ADD_JSON}, {LOOK_UP_JSON}]", ADD + LOOK_UP),
        (f"Wait. [TOOL_CALLS] [{ADD_JSON}]", [Content("Wait."), *ADD]),
        (f" [{ADD_JSON}]", ADD),
        ('[TOOL_CALLS]add[ARGS]{"a":1}[TOOL_CALLS]add{"a":1}', ADD + ADD),
        ("[TOOL_CALLS]rm[ARGS]{}", None),
        ("[TOOL_CALLS]", None),
        ("[1, 2]", None),
        (' [{"name": "x"}]', None),
        ('[TOOL_CALLS]add[ARGS]{"a"', call("add", '{"a"')),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "parts"), [(name, *case) for name, cases in CASES.items() for case in cases])
def test_each_format(name, text, parts):
    """None: no call, and so the text itself."""
    assert read(name, text) == ([Content(text)] if parts is None else parts)


def test_calls_hold_whole_characters_only():
    parts = read("json", r'{"name": "add", "arguments": "{\"a\": \"\ud83d\"}"}')
    assert parts == call("add", '{"a": "\ufffd"}')
    assert read("json", '{"arguments": "' + "[" * 100_000 + '", "name": "add"}')[0].text.startswith("{")


def test_without_parallel_calls_the_first_one_is_all():
    text = f"<tool_call>{ADD_JSON}</tool_call><tool_call>{LOOK_UP_JSON}</tool_call>"
    assert read("hermes", text, parallel=False) == ADD
    assert read("json", f"[{LOOK_UP_JSON}, {ADD_JSON}]", parallel=False) == LOOK_UP


def test_arguments_are_given_out_while_they_come():
    parser = PARSERS["hermes"](NAMES)
    parser.push('<tool_call>{"name": "add", "arguments": {"a')
    assert parser.push('": 1, "b') == [Arguments('": 1, "b')]


def test_a_named_call_is_the_whole_text():
    assert parse(lambda: ForcedCallParser("add"), ['{"a"', ":1}"]) == ADD
    assert parse(lambda: ForcedCallParser("add"), []) == [CallStart("add")]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "add", "look_up",
    '{"name": "add", "arguments": {"a": 1}}', ADD_JSON, LOOK_UP_JSON, '{"name":', '"add"', "{", "}", "[", "]", ",", ";",
    ":", '"', "\\", " ", "\n", "é", "<", "null", '"parameters"', "Hello",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("name", PARSERS)
@given(text=texts, places=st.lists(st.integers(0, 400), max_size=20), parallel=st.booleans())
@example(text=f"[TOOL_CALLS]<tool_call>{ADD_JSON}</tool_call>", places=list(range(400)), parallel=True)
def test_calls_are_the_same_for_each_cut(name, text, places, parallel):
    def make():
        return PARSERS[name](NAMES, parallel=parallel)

    whole = parse(make, [text])
    assert parse(make, cut(text, places)) == whole
    assert parse(make, list(text)) == whole
    if not any(isinstance(part, CallStart) for part in whole):
        assert whole == ([Content(text)] if text else [])  # nothing is lost when there is no call


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@given(text=texts, places=st.lists(st.integers(0, 400), max_size=20))
def test_reasoning_is_the_same_for_each_cut(name, text, places):
    whole = parse(lambda: reasoning_parser(name), [text])
    assert parse(lambda: reasoning_parser(name), cut(text, places)) == whole
    assert parse(lambda: reasoning_parser(name), list(text)) == whole


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nYes. ", [Reasoning("Hm."), Content("Yes. ")]),
        ("qwen3", "\n<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
        ("qwen3", " No. <think>a</think>", [Content(" No. <think>a</think>")]),
        ("qwen3", "<think>a < b </thin", [Reasoning("a < b </thin")]),
        ("deepseek_r1", "Hm.\n</think>\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        ("deepseek_r1", "<think>Hm.</think>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        ("deepseek_r1", "Hm. Hm.", [Reasoning("Hm. Hm.")]),
        ("deepseek_r1", "\n</think>\nYes.", [Content("Yes.")]),
    ],
)
def test_reasoning(name, text, parts):
    assert parse(lambda: reasoning_parser(name), [text]) == parts


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("qwen3", "<think>|Hm|.</think>|Yes|.", 3),
        ("qwen3", "\n|<th|ink>\n\n</th|ink>|\n\n|Yes.", 4),
        ("qwen3", "<think>a</think>Yes|.", 1),
        ("qwen3", "<think>|a| <| b", 4),
        ("qwen3", "Yes|. <think>|a|</think>", 0),
        ("qwen3", "\n|<thi", 0),
        ("deepseek_r1", "Hm|.|</|think|>|Yes", 5),
        ("deepseek_r1", "<think>|Hm|.| </think> Yes|</think>", 4),
        ("deepseek_r1", "|Hm| Hm", 3),
    ],
)
def test_tokens_of_reasoning(name, text, told):
    """Each token that begins before the reasoning's end is one of it."""
    counter = reasoning_tokens(name)
    tokens = [token.encode() for token in text.split("|")]
    counter.take(tokens[:2])
    counter.take(tokens[2:])
    assert counter.count == told
    has_reasoning = any(isinstance(part, Reasoning) for part in parse(lambda: reasoning_parser(name), text.split("|")))
    assert bool(told) >= has_reasoning


@given(text=texts, places=st.lists(st.integers(0, 400), max_size=20))
def test_tokens_of_reasoning_are_all_but_those_of_the_answer(text, places):
    pieces = cut(f"<think>{text}", places)
    counter = reasoning_tokens("qwen3")
    counter.take(piece.encode() for piece in pieces)
    _, mark, answer = f"<think>{text}".partition("</think>")
    after = sum(1 for index in range(len(pieces)) if mark and len("".join(pieces[index:])) <= len(answer))
    assert counter.count == len(pieces) - after


def test_long_arguments_take_time_in_proportion():
    """A call of a million characters, in ten thousand pieces: far from the minutes of a quadratic parser."""
    arguments = json.dumps({"text": "x" * 1_000_000})
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    pieces = [text[start : start + 100] for start in range(0, len(text), 100)]
    began = time.process_time()
    assert parse(lambda: PARSERS["hermes"](NAMES), pieces) == call("add", arguments)
    assert time.process_time() - began < 30

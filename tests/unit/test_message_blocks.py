"""Blocks of messages: for each cut of a text the same, and events that tell how they came about."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation import Ending
from gateway.messages.blocks import Blocks
from gateway.output_check import OutputCheck
from gateway.output_reader import OutputPlan, OutputReader
from gateway.reasoning import reasoning_parser
from gateway.tool_parsers import PARSERS

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
TEXTS = st.lists(st.sampled_from(["<think>", "</think>", "why ", CALL, "Yes.", " ", "漢\n", "<tool"]), max_size=6).map(
    "".join
)
PLAN = OutputPlan(OutputCheck(None), lambda: reasoning_parser("qwen3"), lambda: PARSERS["hermes"](["f"]))
FIELD = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def read(text, cuts):
    """(blocks, events) of a text that comes in pieces."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    reader, blocks, events = OutputReader(PLAN), Blocks(), []
    for start, end in pairwise(places):
        for delta in reader.push(text[start:end]):
            events += blocks.delta(delta)
    for delta in reader.finish(Ending("stop", None))[0]:
        events += blocks.delta(delta)
    events += blocks.close()
    return blocks.content, events


def nameless(blocks):
    """Blocks without what is drawn by lot."""
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


@given(text=TEXTS, cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_blocks_do_not_depend_on_cuts(text, cuts):
    assert nameless(read(text, cuts)[0]) == nameless(read(text, [])[0])


@given(text=TEXTS, cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_events_tell_the_blocks(text, cuts):
    """A client that starts a block, adds its deltas and parses at its stop has the content."""
    content, events = read(text, cuts)
    told, pieces, is_open = [], "", False
    for kind, payload in events:
        if kind == "content_block_start":
            assert not is_open
            assert payload["index"] == len(told)
            told.append(payload["content_block"])
            pieces, is_open = "", True
        assert is_open
        assert payload["index"] == len(told) - 1
        if kind == "content_block_delta":
            pieces += payload["delta"][FIELD[payload["delta"]["type"]]]
        if kind == "content_block_stop":
            is_open = False
            if told[-1]["type"] == "tool_use":
                told[-1]["input"] = json.loads(pieces or "{}")
            else:
                told[-1][told[-1]["type"]] = pieces
    assert not is_open
    assert told == content


def input_of(arguments):
    """What a call with these arguments is told as."""
    blocks = Blocks()
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    list(blocks.delta({"tool_calls": [call]}))
    list(blocks.delta({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}))
    list(blocks.close())
    return blocks.content[0]["input"]


def test_arguments_that_were_cut_short_are_told_as_they_are():
    assert input_of('{"a": ') == {"partial_json": '{"a": '}


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1e999}', "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_of_json_are_told_as_they_are(text):
    assert input_of(text) == {"partial_json": text}


def test_half_a_surrogate_pair_is_no_character():
    assert input_of(r'{"a\udc00": ["\ud83d", "\ud83d\ude00"]}') == {"a\ufffd": ["\ufffd", "\U0001f600"]}

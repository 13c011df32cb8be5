"""Items of responses: for each cut of a text the same, and events that tell how they came about."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.generation import Ending
from gateway.output_check import OutputCheck
from gateway.output_reader import OutputPlan, OutputReader
from gateway.reasoning import reasoning_parser
from gateway.responses.items import Items
from gateway.tool_parsers import PARSERS

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
TEXTS = st.lists(st.sampled_from(["<think>", "</think>", "why ", CALL, "Yes.", " ", "漢\n", "<tool"]), max_size=6).map(
    "".join
)
EVENT = TypeAdapter(ResponseStreamEvent)


def plan():
    return OutputPlan(OutputCheck(None), lambda: reasoning_parser("qwen3"), lambda: PARSERS["hermes"](["f"]))


def read(text, cuts, status="completed"):
    """(items, events) of a text that comes in pieces."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    reader, items, events = OutputReader(plan()), Items(), []
    for start, end in pairwise(places):
        for delta in reader.push(text[start:end]):
            events += items.delta(delta)
    for delta in reader.finish(Ending("stop", None))[0]:
        events += items.delta(delta)
    events += items.close(status)
    return items.output, events


def nameless(items):
    """Items without what is drawn by lot."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


@given(text=TEXTS, cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_items_do_not_depend_on_cuts(text, cuts):
    assert nameless(read(text, cuts)[0]) == nameless(read(text, [])[0])


@given(text=TEXTS, cuts=st.lists(st.integers(0, 1000), max_size=8), status=st.sampled_from(["completed", "incomplete"]))
def test_events_tell_the_items(text, cuts, status):
    """Who only reads deltas, and who only reads what is done, know the output; every event is one that clients know."""
    output, events = read(text, cuts, status)
    by_delta = ["" for _ in output]
    done = {}
    opened = -1
    for number, (kind, payload) in enumerate(events):
        EVENT.validate_python({"type": kind, "sequence_number": number, **payload})
        place = payload["output_index"]
        if kind == "response.output_item.added":
            assert place == opened + 1 == len(done)
            opened = place
        assert place == opened
        if kind.endswith(".delta"):
            assert payload["delta"]
            by_delta[place] += payload["delta"]
        if kind == "response.output_item.done":
            done[place] = payload["item"]
    assert [done[place] for place in range(len(output))] == output
    for item, text_of_deltas in zip(output, by_delta, strict=True):
        told = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert told == text_of_deltas
    assert [item["status"] for item in output] == ["completed"] * (len(output) - 1) + [status]


def test_the_events_of_a_message_come_in_the_documented_order():
    _, events = read("Yes.", [1, 2])
    assert [kind.removeprefix("response.") for kind, _ in events] == [
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip


def test_the_events_of_a_call_come_in_the_documented_order():
    _, events = read(CALL, [])
    assert [kind.removeprefix("response.") for kind, _ in events] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip

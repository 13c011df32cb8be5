"""The record of what runs where: slots and choices under any order of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from protos import inference_pb2, sampling_pb2, worker_pb2
from router.request import GenerateParams, Request, pack_ids
from router.server import in_messages
from router.slot_table import SlotTable
from router.token_logprobs import OutOfStep
from router.validation import check_generate

SIZE = 3


class PlainBytes:
    """A vocabulary whose token n is the letter n."""

    def join(self, token_ids: list[int]) -> bytes:
        return bytes(token_ids)


def params(n: int, **changes) -> GenerateParams:
    wire = inference_pb2.GenerateRequest(n=n, output=inference_pb2.OutputOptions(token_ids=True))
    return check_generate(wire, frozenset({0}), 256)._replace(**changes)


def request(n: int = 1, prompt: int = 2, **changes) -> Request:
    made = Request("r", params(n, **changes), None)
    made.begin([1] * prompt, 100, PlainBytes())
    return made


def batch(*rows: tuple[int, int, int, list[int]]) -> worker_pb2.StepBatch:
    return worker_pb2.StepBatch(
        slots=[row[0] for row in rows],
        generations=[row[1] for row in rows],
        first_indices=[row[2] for row in rows],
        counts=[len(row[3]) for row in rows],
        token_ids=[token_id for row in rows for token_id in row[3]],
    )


class SlotTableMachine(RuleBasedStateMachine):
    """Against a model that keeps every sequence there ever was."""

    bound = Bundle("bound")

    @initialize()
    def begin(self):
        self.table = SlotTable(SIZE)
        self.alive: dict[tuple[int, int], list[int]] = {}
        self.choices = {}

    @rule(target=bound, prompt=st.integers(1, 5))
    def bind(self, prompt):
        if not self.table.has_free:
            return multiple()
        choice = request(prompt=prompt).choices[0]
        slot, generation = self.table.bind(choice)
        assert slot not in {taken for taken, _ in self.alive}
        assert all(generation > old for taken, old in self.choices if taken == slot)
        self.alive[slot, generation] = []
        self.choices[slot, generation] = choice
        return slot, generation

    @rule(key=bound, ids=st.lists(st.integers(65, 90), min_size=1, max_size=3), again=st.integers(0, 2))
    def tokens(self, key, ids, again):
        """Tokens for a sequence, live or gone, some of them for the second time."""
        known = self.alive.get(key, [])
        again = min(again, len(known))
        start = len(known) - again
        self.table.deliver(batch((*key, start, known[start:] + ids)))
        if key in self.alive:
            known += ids

    @rule(key=bound)
    def forget(self, key):
        if key in self.alive and self.table.find(*key) is not None:
            self.table.forget(key[0])
            assert self.table.find(*key) is None

    @rule(key=bound)
    def free(self, key):
        """The worker says that a sequence ended, perhaps twice."""
        self.table.free(*key)
        self.alive.pop(key, None)

    @rule(slot=st.integers(0, SIZE + 2), generation=st.integers(50, 60))
    def strangers_change_nothing(self, slot, generation):
        assert self.table.find(slot, generation) is None
        self.table.free(slot, generation)

    @invariant()
    def agrees_with_the_model(self):
        assert self.table.running == len(self.alive)
        assert self.table.has_free == (len(self.alive) < SIZE)
        for key, ids in self.alive.items():
            if self.table.find(*key) is not None:
                assert self.choices[key].token_ids == ids
        for key, choice in self.choices.items():
            assert (self.table.find(*key) is choice) <= (key in self.alive)
        assert self.table.tokens >= sum(self.choices[key].request.prompt_tokens for key in self.alive)
        assert self.alive or self.table.tokens == 0


SlotTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlotTable = SlotTableMachine.TestCase


def test_missing_tokens_and_odd_columns_are_noticed():
    table = SlotTable(2)
    slot, generation = table.bind(request().choices[0])
    table.deliver(batch((slot, generation, 0, [65, 66])))
    for wrong in (
        batch((slot, generation, 3, [67])),
        batch((2, 1, 0, [67])),
        worker_pb2.StepBatch(slots=[slot], generations=[generation], first_indices=[2], counts=[2], token_ids=[67]),
        worker_pb2.StepBatch(slots=[slot], generations=[generation], first_indices=[2]),
    ):
        with pytest.raises(OutOfStep):
            table.deliver(wrong)


def test_stop_string_frees_the_choice_but_not_the_slot():
    table = SlotTable(1)
    choice = request(stop=("BC",)).choices[0]
    choice.link = object()
    slot, generation = table.bind(choice)
    assert table.deliver(batch((slot, generation, 0, [65, 66, 67, 68]))) == [slot]
    assert choice.ended
    assert choice.link is None
    assert choice.token_ids == [65, 66, 67]
    assert not table.has_free
    assert table.deliver(batch((slot, generation, 4, [69]))) == []
    table.free(slot, generation)
    assert table.has_free


def test_pending_text_is_sent_once_and_together():
    choice = request().choices[0]
    assert choice.take_unsent() == []
    choice.take(0, [65, 66])
    choice.take(2, [67])
    (sent,) = choice.take_unsent()
    assert (sent.delta.text, list(sent.delta.token_ids), sent.delta.first_index) == ("ABC", [65, 66, 67], 0)
    choice.take(3, [68, 0])
    usage = sampling_pb2.Usage(completion_tokens=5)
    choice.finish(usage, sampling_pb2.FINISH_REASON_STOP, 0, "")
    delta, finished = choice.take_unsent()
    assert (delta.delta.text, list(delta.delta.token_ids), delta.delta.first_index) == ("D", [68, 0], 3)
    assert finished.finished.WhichOneof("stop_cause") is None
    assert choice.take_unsent() == []


def test_a_stream_whose_client_is_too_far_behind_is_paused():
    made = Request("r", params(1), None, max_unsent_bytes=64 * 10)
    made.begin([1, 1], 100, PlainBytes())
    (choice,) = made.choices
    table = SlotTable(1)
    slot, generation = table.bind(choice)
    assert table.deliver(batch((slot, generation, 0, [65] * 10))) == []
    choice.take_unsent()
    assert choice.caught_up
    assert table.deliver(batch((slot, generation, 10, [65] * 10))) == []
    assert not choice.paused
    assert table.deliver(batch((slot, generation, 20, [65]))) == [slot]
    assert choice.paused
    assert choice.link is None
    assert not choice.caught_up
    assert table.deliver(batch((slot, generation, 21, [65]))) == [], "the worker goes on until it hears of it"
    assert [list(sent.delta.token_ids) for sent in choice.take_unsent()] == [[65] * 10, [65]]
    assert choice.caught_up


def test_a_long_answer_that_is_sent_at_its_end_goes_out_in_parts_and_is_paused_like_others():
    made = Request("r", params(1, final_only=True), None, max_unsent_bytes=64 * 10)
    made.begin([1, 1], 100, PlainBytes())
    (choice,) = made.choices
    assert not choice.take(0, [65] * 9)
    assert not made.changed.is_set()
    assert made.take_unsent() == []
    assert not choice.take(9, [66])
    assert made.changed.is_set()
    (part,) = made.take_unsent()
    assert part.delta.text == "A" * 9 + "B"
    assert not choice.take(10, [67])
    assert made.take_unsent() == []
    assert choice.take(11, [67] * 10)
    assert choice.paused


def test_no_delta_has_more_than_a_message_should():
    made = Request("r", params(1), None, max_unsent_bytes=64 * 10)
    made.begin([1, 1], 100, PlainBytes())
    (choice,) = made.choices
    choice.take(0, list(range(65, 90)))
    deltas = [event.delta for event in made.take_unsent()]
    assert [(delta.first_index, len(delta.token_ids)) for delta in deltas] == [(0, 10), (10, 10), (20, 5)]
    assert "".join(delta.text for delta in deltas) == "".join(map(chr, range(65, 90)))
    assert [token for delta in deltas for token in delta.token_ids] == list(range(65, 90))


def test_large_events_go_in_messages_of_their_own():
    def event(size: int) -> inference_pb2.GenerateEvent:
        return inference_pb2.GenerateEvent(delta=inference_pb2.Delta(text="x" * size))

    events = [event(size) for size in (400_000, 400_000, 400_000, 2_000_000, 10)]
    together = list(in_messages(events))
    assert [len(message) for message in together] == [2, 1, 1, 1]
    assert [one for message in together for one in message] == events
    assert list(in_messages([])) == []


def test_log_probabilities_that_were_sent_are_forgotten():
    choice = request(logprobs=1).choices[0]
    for start in (0, 3):
        columns = sampling_pb2.Logprobs(
            logprobs=[float(start + place) for place in range(3)], top_count=1, top_token_ids=[65, 66, 67],
            top_logprobs=[0.5, 0.25, 0.125],
        )  # fmt: skip
        choice.take_logprobs(start, columns)
        choice.take(start, [65, 66, 67])
        (sent,) = choice.take_unsent()
        assert sent.delta.logprobs == columns
    assert len(choice._logprobs._logprobs) == len(choice._logprobs._top_ids) == 0


def test_prompt_is_packed_little_endian():
    assert pack_ids([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"

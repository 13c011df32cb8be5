"""The checker finds what it is there to find: each planted fault, in an otherwise faultless history."""

import re
from collections.abc import Callable

import pytest

from protos import inference_pb2, sampling_pb2
from tests.chaos.history import LENGTH, STOP, Order, Seen, WorkerAtRest, faults_at_rest, faults_in
from tests.chaos.scripted_engine import STOP_TOKEN, word

ORDER = Order("r", tuple(range(20, 60)), 50, seed=3, n=2)


def faultless(order: Order = ORDER) -> Seen:
    seen = Seen(order)
    for index in range(order.n):
        output = order.expected(index)
        seen.deltas += [(index, at, output[at : at + 7]) for at in range(0, len(output), 7)]
        reason = STOP if output[-1] == STOP_TOKEN or order.shape else LENGTH
        usage = sampling_pb2.Usage(prompt_tokens=len(order.prompt), completion_tokens=len(output), cached_tokens=16)
        seen.finished.append(inference_pb2.Finished(index=index, reason=reason, usage=usage))
    return seen


def test_a_faultless_history_passes() -> None:
    assert faults_in(faultless()) == []
    assert ORDER.expected(0) != ORDER.expected(1)
    assert len(ORDER.expected(0)) > 14


def test_outputs_of_a_shape_are_checked_word_by_word() -> None:
    order = Order("r", tuple(range(20, 60)), 50, seed=3, n=1, shape=("ad", "b", "cj") * 5)
    assert [word(token)[0] in letters for token, letters in zip(order.expected(0), order.shape, strict=True)] == [
        True
    ] * 15
    assert re.fullmatch(order.regex, "".join(map(word, order.expected(0))))
    assert faults_in(faultless(order)) == []
    lost_count = faultless(order)
    lost_count.deltas[1] = (0, 7, order.expected(0)[8:15])
    assert faults_in(lost_count)


def duplicate(seen: Seen) -> None:
    seen.deltas.insert(2, seen.deltas[1])


def silent_duplicate(seen: Seen) -> None:
    """A token twice, with all later indices moved so that they fit."""
    seen.deltas[1:] = [(index, first + (index == 0), ids) for index, first, ids in seen.deltas[1:]]
    seen.deltas[0][2].append(seen.deltas[0][2][-1])


def gap(seen: Seen) -> None:
    del seen.deltas[1]


def silent_gap(seen: Seen) -> None:
    seen.deltas[1:] = [(index, first - (index == 0), ids) for index, first, ids in seen.deltas[1:]]
    del seen.deltas[0][2][-1]


def wrong_token(seen: Seen) -> None:
    seen.deltas[1][2][3] += 1


def swapped_choices(seen: Seen) -> None:
    seen.deltas = [(1 - index, first, ids) for index, first, ids in seen.deltas]


def missing_end(seen: Seen) -> None:
    del seen.finished[1]


def second_end(seen: Seen) -> None:
    seen.finished.append(seen.finished[0])


def short_usage(seen: Seen) -> None:
    seen.finished[0].usage.completion_tokens -= 1


def usage_of_a_later_attempt(seen: Seen) -> None:
    seen.finished[0].usage.prompt_tokens += 9


def wrong_reason(seen: Seen) -> None:
    seen.finished[0].reason = sampling_pb2.FINISH_REASON_CANCELLED


def tokens_after_the_end(seen: Seen) -> None:
    seen.add(inference_pb2.GenerateEvent(delta=inference_pb2.Delta(index=0, first_index=50, token_ids=[1000])))


def failed_call(seen: Seen) -> None:
    seen.error = "UNAVAILABLE"


@pytest.mark.parametrize(
    "plant",
    [
        duplicate, silent_duplicate, gap, silent_gap, wrong_token, swapped_choices, missing_end, second_end,
        short_usage, usage_of_a_later_attempt, wrong_reason, tokens_after_the_end, failed_call,
    ],
)  # fmt: skip
def test_planted_faults_are_found(plant: Callable[[Seen], None]) -> None:
    seen = faultless()
    plant(seen)
    assert faults_in(seen)


@pytest.mark.parametrize("held", [(0, 0, 399), (1, 0, 400), (0, 1, 400)], ids=["leaked block", "running", "waiting"])
def test_what_a_worker_still_holds_is_found(held: tuple[int, int, int]) -> None:
    clean = WorkerAtRest("a", 0, 0, 400, 400)
    assert faults_at_rest([clean]) == []
    assert faults_at_rest([clean, WorkerAtRest("b", *held, num_blocks=400)])

"""The bounds on the queue: who is refused, who gives way, and when clients are told to come back."""

import asyncio

import pytest

from protos import inference_pb2
from protos.prefix import block_hashes
from router.admission import MAX_RETRY_S, MIN_RETRY_S, WaitingQueue
from router.errors import QueueFull
from router.request import Choice, GenerateParams, Request, pack_ids
from router.routing.output_lengths import OutputLengths
from router.routing.worker_view import Placed
from router.validation import check_generate
from tests.doubles.virtual_fleet import BLOCK, VirtualFleet


class PlainBytes:
    """A vocabulary whose token n is the letter n."""

    def join(self, token_ids: list[int]) -> bytes:
        return bytes(token_ids)


def params(n: int, **changes) -> GenerateParams:
    return check_generate(inference_pb2.GenerateRequest(n=n), frozenset({0}), 256)._replace(**changes)


def request(n: int = 1, prompt: int = 10, **changes) -> Request:
    made = Request("r", params(n, **changes), None)
    made.begin([1] * prompt, 100, PlainBytes())
    return made


class Full:
    """A queue before a worker that can take nothing until ``open`` is called."""

    def __init__(self, max_requests: int = 10, max_tokens: int = 1000) -> None:
        self.fleet = VirtualFleet(1, max_slots=100)
        self.fleet.views[0].open = False
        self.queue = WaitingQueue(self.fleet.queue, self.fleet.dispatcher, max_requests, max_tokens)
        self.now = 0.0

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.now += 1.0
            self.queue.add(each, BLOCK, self.now)

    def drain(self) -> list[Choice]:
        """The order in which a worker gets what waits."""
        self.fleet.views[0].open = True
        return [self.queue.take(entry) for entry, _, _ in self.fleet.dispatcher.dispatch(self.now).placed]


def test_equal_requests_are_served_as_they_come_with_their_choices_together():
    full = Full()
    first, second = request(n=2), request()
    full.add(first, second)
    assert len(full.queue) == 2
    assert full.drain() == [*first.choices, *second.choices]
    assert len(full.queue) == 0


def test_lower_priorities_come_first():
    full = Full()
    late, early, early_too, urgent = (request(n=2, priority=priority) for priority in (3, 0, 0, -1))
    full.add(late, early, early_too, urgent)
    assert full.drain() == [choice for each in (urgent, early, early_too, late) for choice in each.choices]


def test_what_is_put_back_has_waited_since_it_came():
    full = Full()
    first, second = request(n=3), request()
    full.add(first, second)
    taken = full.drain()
    assert len(taken) == 4
    full.fleet.views[0].open = False
    full.add(request())
    for choice in (second.choices[0], first.choices[0], first.choices[1]):
        full.queue.put_back(choice, BLOCK, full.now)
    assert first in full.queue
    assert full.drain()[:3] == [first.choices[1], first.choices[0], second.choices[0]]


def test_who_gives_up_is_forgotten():
    full = Full()
    first, second = request(n=2), request()
    full.add(first, second)
    full.queue.discard(first)
    full.queue.discard(first)
    assert full.drain() == second.choices


async def test_places_bound_those_that_wait_and_those_that_enter():
    full = Full(max_requests=2)
    full.add(request())
    queue = full.queue
    with queue.place():
        with pytest.raises(QueueFull), queue.place():
            pass
        full.add(request())
    with pytest.raises(QueueFull), queue.place():
        pass
    full.drain()
    with pytest.raises(asyncio.CancelledError), queue.place():
        raise asyncio.CancelledError
    with queue.place(), queue.place():
        pass


def test_prompt_tokens_are_bounded_but_one_request_always_fits():
    full = Full(max_tokens=100)
    full.add(request(prompt=300))
    with pytest.raises(QueueFull, match="300 prompt tokens"):
        full.add(request(prompt=1))
    assert len(full.queue) == 1


def test_the_newest_of_the_lowest_class_gives_way_to_a_higher_one():
    full = Full(max_requests=3)
    low, lower, lower_too = request(priority=1), request(priority=2), request(priority=2)
    full.add(low, lower, lower_too)
    with pytest.raises(QueueFull), full.queue.place(priority=2):
        pass
    with full.queue.place(priority=0):
        full.add(request(priority=0))
    assert isinstance(lower_too.failure, QueueFull)
    assert lower_too not in full.queue
    assert (lower.failure, low.failure, len(full.queue)) == (None, None, 3)


def test_as_many_give_way_as_it_takes():
    full = Full(max_tokens=100)
    small = [request(prompt=30, priority=5) for _ in range(3)]
    full.add(*small)
    full.add(request(prompt=50, priority=0))
    assert [each.failure is None for each in small] == [True, False, False]


def test_retry_after_is_the_time_that_the_backlog_takes():
    full = Full(max_tokens=10**9)
    assert full.queue.retry_after() == MIN_RETRY_S
    full.fleet.measured(rate=1000)
    full.add(request(prompt=5000))
    assert full.queue.retry_after() == pytest.approx(5.0)
    full.fleet.views[0].place(Placed([], 7000, 0, 7000, "", 0.0, 0.0))
    assert full.queue.retry_after() == pytest.approx(12.0)
    full.add(request(prompt=10**6))
    assert full.queue.retry_after() == MAX_RETRY_S


def test_tenants_share_alike():
    full = Full()
    greedy = [request(tenant="greedy") for _ in range(4)]
    full.add(*greedy)
    modest = request(tenant="modest")
    full.add(modest)
    assert full.drain().index(modest.choices[0]) <= 1


def test_salts_do_not_share_names_and_prompts_to_be_computed_whole_have_none():
    full = Full()
    entries = [full.queue._entry(each, BLOCK, 0.0) for each in (
        request(), request(), request(cache_salt=b"s"), request(skip_reading_prefix_cache=True),
        request(session_id="chat"),
    )]  # fmt: skip
    assert entries[0].names == entries[1].names
    assert not set(entries[0].names) & set(entries[2].names)
    assert list(entries[3].names) == []
    assert entries[4].affinity == b"chat"


def test_retry_after_knows_that_what_decodes_holds_its_place():
    full = Full()
    view = full.fleet.views[0]
    view.max_num_seqs = view.running = view.max_slots = 2
    view.throughput.step_s = 0.1
    lengths = full.fleet.dispatcher.output_lengths
    view.next_end_steps = lengths.until_next_end([(10, 200), (30, 100)])
    assert full.queue.retry_after() == pytest.approx(70 * 0.1)
    lengths.typical = 50.0
    full.add(request(), second := request())
    assert full.queue.retry_after() == pytest.approx(70 * 0.1 + 2 * 50 * 0.1 / 2)
    full.queue.discard(second)
    assert full.queue.retry_after() == pytest.approx(70 * 0.1 + 50 * 0.1 / 2)
    full.fleet.views[0].open = True
    view.running = 1
    assert full.queue.retry_after() == MIN_RETRY_S, "there is a place"


@pytest.mark.parametrize(
    ("running", "steps"),
    [([], 0), ([(0, 300)], 100), ([(60, 70)], 10), ([(150, 10_000)] * 4, 25), ([(150, 10_000), (95, 300)], 5)],
    ids=["none", "typical", "almost all it may", "longer than most", "the first of them"],
)
def test_when_the_next_output_ends(running, steps):
    lengths = OutputLengths()
    for _ in range(500):
        lengths.ended(100)
    assert lengths.until_next_end(running) == pytest.approx(steps)


def moved_with(output: int) -> tuple[Full, Request]:
    """A queue to which a request's second choice was given back after so many tokens."""
    full = Full(max_tokens=10**9)
    full.fleet.measured(rate=1000)
    moved = request(n=2)
    full.add(moved)
    full.drain()
    full.fleet.views[0].open = False
    moved.choices[1].take(0, [65] * output)
    full.queue.put_back(moved.choices[1], BLOCK, full.now)
    return full, moved


def test_output_that_is_computed_again_counts_as_prompt():
    full, moved = moved_with(output=5000)
    view = full.fleet.views[0]
    backlog, memory = view.backlog, view.memory_use(0)
    full.queue.put_back(moved.choices[0], BLOCK, full.now)
    assert full.fleet.queue.missing >= 5000, "the longest of a request's counts"
    assert full.queue.retry_after() > 5.0
    full.queue.discard(moved)
    full.queue.put_back(moved.choices[1], BLOCK, full.now)
    full.drain()
    assert view.backlog - backlog >= 5000
    assert view.memory_use(0) - memory == pytest.approx(5000 / BLOCK / view.num_blocks, rel=0.01)


@pytest.mark.parametrize("seconds_left", [4.0, 6.0])
def test_a_deadline_must_leave_time_to_compute_the_output_again(seconds_left):
    full, moved = moved_with(output=5000)
    full.queue.discard(moved)
    full.fleet.views[0].backlog = 0
    moved.deadline = full.now + seconds_left
    full.queue.put_back(moved.choices[1], BLOCK, full.now)
    full.fleet.views[0].open = True
    assert bool(full.fleet.dispatcher.dispatch(full.now).hopeless) == (seconds_left < 5)


def test_a_worker_that_has_the_output_cached_need_not_compute_it_again():
    full, moved = moved_with(output=5000)
    full.queue.discard(moved)
    full.fleet.follow(0, *block_hashes(pack_ids([1] * 10 + [65] * 5000), BLOCK, b""))
    full.queue.put_back(moved.choices[1], BLOCK, full.now)
    assert full.fleet.queue.missing <= BLOCK

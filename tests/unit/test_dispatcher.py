"""Which request goes where, and when."""

import pytest

from protos import worker_pb2
from router.routing.dispatcher import QUANTUM
from router.routing.policies import POLICIES, LeastLoad, PowerOfTwo, Random, RoundRobin, Session
from router.routing.score import MEMORY_LIMIT, MISS_WEIGHT, MISS_WEIGHT_WITH_ROOM, score
from router.routing.throughput import PRIOR_PREFILL_RATE, Throughput
from router.routing.worker_view import Placed, level_rates
from tests.doubles.virtual_fleet import VirtualFleet, names, waiting

LONG = list(range(800))


def run(fleet: VirtualFleet, number: int, count: int = 1) -> None:
    """A worker decodes so many sequences more."""
    view = fleet.views[number]
    for _ in range(count):
        placed = Placed([], 1, 0, 1, "", 0.0, 0.0)
        view.place(placed)
        view.admit(placed, 0, 0.0)
        view.begin_decode(placed, 0.0)


def burden(fleet: VirtualFleet, number: int, tokens: int) -> Placed:
    """A worker has so many prompt tokens to compute."""
    placed = Placed([], tokens, 0, tokens, "", 0.0, 0.0)
    fleet.views[number].place(placed)
    return placed


def test_a_prefix_goes_to_the_worker_that_has_it():
    fleet = VirtualFleet(3)
    fleet.follow(1, *names(*LONG))
    assert fleet.ask(waiting(prompt=[*LONG, 1, 2])) == [1]
    assert fleet.ask(waiting(prompt=LONG[:400])) == [1]


def test_two_that_follow_each_other_closely_find_each_others_prefix():
    fleet = VirtualFleet(4)
    assert len(set(fleet.ask(waiting(prompt=LONG), waiting(prompt=LONG)))) == 1


@pytest.mark.parametrize(("room", "weight"), [(True, MISS_WEIGHT_WITH_ROOM), (False, MISS_WEIGHT)])
def test_a_prefix_is_computed_again_elsewhere_when_waiting_costs_more(room, weight):
    fleet = VirtualFleet(2, max_num_batched_tokens=100_000, num_blocks=10_000 if room else 1000)
    fleet.follow(0, *names(*LONG))
    fleet.follow(1, *names(*range(1000, 5000)))
    prompt = [*LONG, 1, 2]
    burden(fleet, 0, int(weight * len(LONG)) - 50)
    assert fleet.ask(waiting(prompt=prompt)) == [0]
    burden(fleet, 0, 200)
    assert fleet.ask(waiting(prompt=prompt)) == [1]


def test_nothing_is_bound_before_a_worker_can_start_it():
    fleet = VirtualFleet(1)
    heavy = burden(fleet, 0, 1500)
    entry = waiting(10)
    assert fleet.ask(entry) == []
    fleet.views[0].admit(heavy, 1000, 0.1)
    assert fleet.ask() == [0]
    assert entry not in fleet.queue


def test_it_waits_for_a_worker_that_is_busy_but_soon_the_best():
    fleet = VirtualFleet(2, num_blocks=1000)
    fleet.follow(0, *names(*LONG))
    fleet.follow(1, *names(*range(1000, 5000)))
    heavy = burden(fleet, 0, 1200)
    other = waiting(50, arrival=1.0)
    assert fleet.ask(waiting(prompt=[*LONG, 5]), other) == [1], "the one behind it does not wait"
    fleet.views[0].admit(heavy, 1200, 0.1)
    assert fleet.ask() == [0]


def test_it_does_not_wait_for_a_slot():
    fleet = VirtualFleet(2, max_slots=2)
    fleet.follow(0, *names(*LONG))
    run(fleet, 0, 2)
    assert fleet.ask(waiting(prompt=[*LONG, 5])) == [1]


@pytest.mark.parametrize("other", ["other", "behind/other"], ids=["account", "user of one account"])
@pytest.mark.parametrize("lag", [QUANTUM - 500, QUANTUM + 500])
def test_who_fell_behind_waits_for_no_worker_of_its_choice(other, lag):
    fleet = VirtualFleet(2, num_blocks=1000)
    fleet.follow(0, *names(*LONG))
    fleet.follow(1, *names(*range(1000, 5000)))
    burden(fleet, 0, 1200)
    behind = waiting(prompt=[*LONG, 5], tenant="behind/user")
    for entry in (behind, waiting(50, tenant=other, priority=0)):
        fleet.dispatcher.add(entry)
    fleet.counters.charge(other, missing=lag)
    placed = [view.number for entry, view, _ in fleet.dispatcher.dispatch(0.0).placed if entry is behind]
    assert placed == ([1] if lag > QUANTUM else []), "its choice is 0, which has all of it and is busy"


@pytest.mark.parametrize("ahead", ["ahead", "behind/ahead"], ids=["account", "user of one account"])
@pytest.mark.parametrize("lead", [QUANTUM - 500, QUANTUM + 500])
def test_who_is_far_ahead_waits_while_the_one_behind_waits_for_memory(ahead, lead):
    """Worker after worker must run dry for the one behind: else the small requests of the other keep it waiting."""
    fleet = VirtualFleet(2, num_blocks=100)
    for number in (0, 1):
        run(fleet, number)
        fleet.views[number].report(1, worker_pb2.Load(free_blocks=10))
    fleet.follow(0, *names(*range(4)))  # each has a worker that it is sent to
    fleet.follow(1, *names(*range(1000, 1004)))
    small = waiting(prompt=[*range(1000, 1008)], tenant=ahead, arrival=1.0)
    for entry in (waiting(prompt=[*range(300)], tenant="behind/user"), small):
        fleet.dispatcher.add(entry)
    fleet.counters.charge(ahead, missing=lead)
    placed = [entry for entry, _, _ in fleet.dispatcher.dispatch(1.0).placed]
    assert placed == ([] if lead > QUANTUM else [small])


def test_of_equals_the_one_that_decodes_less_then_the_coldest_then_always_the_same():
    fleet = VirtualFleet(2, num_blocks=4)
    run(fleet, 0)
    assert fleet.ask(waiting(8)) == [1]
    fleet = VirtualFleet(4)
    first = [waiting(prompt=[number] * 8) for number in range(40)]
    again = [waiting(prompt=[number] * 8) for number in range(40)]
    chosen = [VirtualFleet(4).ask(entry)[0] for entry in first]
    assert chosen == [VirtualFleet(4).ask(entry)[0] for entry in again]
    assert set(chosen) == {0, 1, 2, 3}


def test_all_choices_of_a_request_are_placed_and_share_its_prompt():
    fleet = VirtualFleet(3)
    entry = waiting(prompt=LONG, places=3)
    fleet.dispatcher.add(entry)
    placed = fleet.dispatcher.dispatch(0.0).placed
    assert len({view.number for _, view, _ in placed}) == 1
    assert [one.predicted_tokens for _, _, one in placed] == [0, len(LONG) - 4, len(LONG) - 4]
    assert entry not in fleet.queue


def test_memory_is_promised_once_and_nothing_slips_past_who_waits_for_it():
    fleet = VirtualFleet(1, num_blocks=100)
    run(fleet, 0)
    fleet.views[0].report(1, worker_pb2.Load(free_blocks=50))
    big, small = waiting(300, arrival=0.0), waiting(4, arrival=10.0)
    assert fleet.ask(big, small) == []
    fleet.views[0].report(2, worker_pb2.Load(free_blocks=40, cached_blocks=40))
    assert fleet.ask() == [0, 0]
    fleet.views[0].report(3, worker_pb2.Load(free_blocks=40, cached_blocks=40))
    assert fleet.ask(waiting(80)) == [], "the first one's blocks are promised and not yet taken"


def test_a_worker_alone_takes_what_it_must():
    assert VirtualFleet(1, num_blocks=10).ask(waiting(1000)) == [0]


def test_memory_pressure_grows_steeply():
    fleet = VirtualFleet(1, num_blocks=100)
    parts = []
    for free in (30, 8, 2):
        fleet.views[0].report(1, worker_pb2.Load(free_blocks=free))
        parts.append(score(fleet.views[0], 4, 0).memory)
    assert parts[0] == 0.0
    assert 0 < parts[1] < parts[2]
    assert fleet.views[0].memory_use(0) > MEMORY_LIMIT


def test_deadlines_that_cannot_be_met_are_told_before_a_worker_hears_of_them():
    fleet = VirtualFleet(2)
    hopeless = waiting(5000, deadline=1.0)
    assert not fleet.dispatcher.is_hopeless(hopeless, 0.0), "no worker has said how fast it is"
    fleet.measured(rate=1000)
    late, soon = waiting(5000, deadline=1.0), waiting(5000, deadline=10.0)
    for entry in (late, soon):
        fleet.dispatcher.add(entry)
    done = fleet.dispatcher.dispatch(0.0)
    assert done.hopeless == [late]
    assert [entry for entry, _, _ in done.placed] == [soon]
    assert len(fleet.queue) == 0


def test_workers_that_take_nothing_are_left_out():
    fleet = VirtualFleet(2)
    fleet.follow(0, *names(*LONG))
    fleet.views[0].accepting = False
    assert fleet.ask(waiting(prompt=LONG)) == [1]
    fleet.views[1].open = False
    assert fleet.ask(waiting(4)) == []


def test_reasons():
    fleet = VirtualFleet(2, max_num_batched_tokens=100_000)
    for entry in (waiting(prompt=LONG), waiting(prompt=LONG)):
        fleet.dispatcher.add(entry)
    first, second = fleet.dispatcher.dispatch(0.0).placed
    assert (first[2].reason, second[2].reason) == ("load", "prefix")
    holder = first[1].number
    burden(fleet, holder, 50_000)
    fleet.dispatcher.add(waiting(prompt=LONG))
    assert fleet.dispatcher.dispatch(0.0).placed[0][2].reason == "balance"


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_everyone(name):
    fleet = VirtualFleet(3, POLICIES[name]())
    assert len(fleet.ask(*(waiting(10, arrival=float(number)) for number in range(12)))) == 12


def test_simple_policies():
    assert VirtualFleet(3, RoundRobin()).ask(*(waiting(10) for _ in range(6))) == [0, 1, 2, 0, 1, 2]
    fleet = VirtualFleet(2, LeastLoad())
    run(fleet, 0)
    assert fleet.ask(waiting(10)) == [1]
    assert set(VirtualFleet(3, Random(1), max_slots=50).ask(*(waiting(1) for _ in range(40)))) == {0, 1, 2}
    fleet = VirtualFleet(2, PowerOfTwo(1), max_slots=50)
    run(fleet, 1, 3)
    assert fleet.ask(waiting(10)) == [0]


def test_a_session_stays_on_its_worker_and_few_move_when_one_goes():
    sessions = [f"s{number}".encode() for number in range(60)]
    before = [VirtualFleet(4, Session()).ask(waiting(10, affinity=name))[0] for name in sessions]
    assert set(before) == {0, 1, 2, 3}
    for name, chosen in zip(sessions, before, strict=True):
        fleet = VirtualFleet(4, Session())
        fleet.views[3].accepting = False
        assert fleet.ask(waiting(10, affinity=name)) == [chosen] or chosen == 3


def test_speed_is_learned_from_steps_that_compute_prompts():
    speed = Throughput(1000)
    assert (speed.prefill_rate, speed.measured) == (PRIOR_PREFILL_RATE, False)
    speed.observe(1, worker_pb2.Load(prefill_tokens=0, busy_us=0))
    speed.observe(11, worker_pb2.Load(prefill_tokens=10, busy_us=1_000_000))
    assert not speed.measured, "ten tokens say nothing of the rate"
    assert speed.step_s > 0.02
    speed.observe(12, worker_pb2.Load(prefill_tokens=1010, busy_us=1_500_000))
    assert speed.prefill_rate == pytest.approx(2000)
    speed.observe(12, worker_pb2.Load(prefill_tokens=9999, busy_us=9_000_000))
    assert speed.prefill_rate == pytest.approx(2000), "no new step, no news"
    for step in range(13, 40):
        speed.observe(step, worker_pb2.Load(prefill_tokens=1010 * step, busy_us=1_500_000 + (step - 12) * 250_000))
    assert 3500 < speed.prefill_rate < 4500


def test_workers_about_as_fast_as_most_count_as_equal_and_others_do_not():
    fleet = VirtualFleet(5)
    for view, rate in zip(fleet.views, (1000, 1100, 2000, 900), strict=False):
        view.throughput.observe(1, worker_pb2.Load())
        view.throughput.observe(2, worker_pb2.Load(prefill_tokens=1000, busy_us=int(1e9 / rate)))
    level_rates(fleet.views)
    assert [view.prefill_rate for view in fleet.views] == pytest.approx([1000, 1000, 2000, 1000, 1000])


def test_backlog_follows_what_the_worker_reports():
    fleet = VirtualFleet(1)
    view = fleet.views[0]
    first, second = burden(fleet, 0, 3000), burden(fleet, 0, 500)
    view.admit(first, 1000, 0.0)
    assert view.backlog == 2500
    view.report(1, worker_pb2.Load(queued_prefill_tokens=1200, free_blocks=9000))
    assert (first.rest, second.rest, view.backlog) == (1200, 500, 1700)
    view.begin_decode(first, 1.0)
    assert (view.backlog, view.decoding) == (500, 1)
    view.end(first, 2.0)
    view.end(second, 2.0)
    assert (view.backlog, view.running, view.prefilling) == (0, 0, set())

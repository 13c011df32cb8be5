"""The order of those who wait, and what tenants owe each other."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.dispatcher import QUANTUM
from router.routing.fair_queue import AGEING_TOKENS_S, FairQueue
from router.routing.tenant_counters import MAX_SHARED_ACCOUNTS, TenantCounters
from router.routing.virtual_counters import MAX_TENANTS, OUTPUT_COST, VirtualCounters, cost
from tests.doubles.virtual_fleet import VirtualFleet, waiting


def order(queue: FairQueue) -> list:
    return list(queue.in_order())


def filled(*entries) -> FairQueue:
    queue = FairQueue(TenantCounters())
    for entry in entries:
        queue.add(entry)
    return queue


def test_classes_come_before_all_else():
    late, soon, urgent = (waiting(tokens, priority=priority) for tokens, priority in ((1, 3), (900, 0), (9000, -1)))
    assert order(filled(late, soon, urgent)) == [urgent, soon, late]


def test_within_a_tenant_the_least_work_comes_first_and_waiting_makes_up_for_work():
    long_, short = waiting(5000, arrival=0.0), waiting(100, arrival=1.0)
    assert order(filled(long_, short)) == [short, long_]
    patience = 4900 / AGEING_TOKENS_S
    assert order(filled(long_, waiting(100, arrival=patience + 0.1)))[0] is long_


def test_tenants_take_turns_whatever_each_has_waiting():
    many = [waiting(1000, tenant="many", arrival=float(number)) for number in range(4)]
    few = [waiting(1000, tenant="few", arrival=9.0)]
    assert order(filled(*many, *few)).index(few[0]) <= 1


def test_who_was_served_less_goes_first():
    queue = FairQueue(TenantCounters())
    greedy, modest = waiting(10, tenant="greedy"), waiting(5000, tenant="modest", arrival=5.0)
    for entry in (greedy, modest):
        queue.add(entry)
    queue.counters.charge("greedy", missing=100)
    assert order(queue) == [modest, greedy]


def test_nobody_saves_up_by_staying_away_nor_pays_off_a_debt():
    counters = TenantCounters()
    queue = FairQueue(counters)
    queue.add(waiting(tenant="busy"))
    counters.charge("busy", output=5000)
    newcomer = waiting(tenant="new")
    queue.add(newcomer)
    assert counters.of_account("new") == counters.of_account("busy"), "lifted to the least of those who wait"
    counters.charge("new", output=1000)
    owed = counters.of_account("new")
    queue.discard(newcomer)
    queue.add(newcomer)
    assert counters.of_account("new") == owed


def test_costs_are_those_that_are_documented():
    assert cost(missing=10, cached=100, output=7) == pytest.approx(10 + 10 + 14)


def test_tenants_are_bounded_and_the_indebted_are_remembered():
    counters = VirtualCounters()
    counters.join("debtor", [])
    counters.charge("debtor", output=10**9)
    for number in range(MAX_TENANTS + 10):
        counters.join(f"t{number}", [])
    assert len(counters._counters) <= MAX_TENANTS
    assert counters.of("debtor") == OUTPUT_COST * 10**9


def test_what_is_missing_is_summed_and_kept_in_order():
    first, second = waiting(100), waiting(200)
    queue = filled(first, second)
    assert (queue.missing, len(queue)) == (300, 2)
    queue.update(second, 50)
    assert (queue.missing, order(queue)) == (150, [second, first])
    queue.discard(first)
    queue.discard(first)
    assert (queue.missing, len(queue), first in queue, second in queue) == (50, 1, False, True)


def test_the_newest_of_the_lowest_class_goes_first():
    old, new, high = (
        waiting(priority=2, arrival=1.0),
        waiting(priority=2, arrival=2.0),
        waiting(priority=0, arrival=9.0),
    )
    assert filled(old, new, high).last_of_lowest_class() is new
    assert FairQueue(TenantCounters()).last_of_lowest_class() is None


def test_an_accounts_share_does_not_grow_with_its_users():
    crowd = [waiting(1000, tenant=f"crowd/u{number}", arrival=float(number)) for number in range(9)]
    alone = [waiting(1000, tenant="alone", arrival=10.0 + number) for number in range(3)]
    first = order(filled(*crowd, *alone))[:6]
    assert [entry.tenant.partition("/")[0] for entry in first].count("alone") == 3


def test_a_newcomer_waits_behind_no_debt_of_another_account():
    counters = TenantCounters()
    counters.charge("rich/x", output=10**6)
    queue = FairQueue(counters)
    for tenant in ("rich/x", "poor/a"):
        entry = waiting(tenant=tenant)
        queue.add(entry)
        queue.discard(entry)
    waiting_user, newcomer = waiting(tenant="poor/a"), waiting(tenant="poor/b")
    queue.add(waiting_user)
    queue.add(newcomer)
    assert counters.of_user("poor/b") == counters.of_user("poor/a")


def test_accounts_whose_users_are_told_apart_are_bounded():
    counters = TenantCounters()
    for number in range(MAX_SHARED_ACCOUNTS + 5):
        counters.join(f"a{number}/u", [], [])
    assert len(counters._users) == MAX_SHARED_ACCOUNTS
    counters.charge("a0/u", output=5)  # what is forgotten can be charged, and leave
    counters.leave("a0/u", last=True)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 3),
    users=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_tenants_that_wait_all_the_while_are_served_alike(seed, workers, users):
    """The published bound: no two are further apart than QUANTUM, one request, and what runs but is not yet charged.

    It holds between accounts, however many users each has, and between the users of each account. What each one was
    served is added up here, from what was placed and generated: counters that are wrong would agree with themselves.
    """
    chance = random.Random(seed)
    fleet = VirtualFleet(workers, max_slots=4, max_num_batched_tokens=2000)
    longest, output = 12_000, 400
    accounts = {f"a{number}": [f"a{number}/u{user}" for user in range(count)] for number, count in enumerate(users)}
    tenants = [tenant for named in accounts.values() for tenant in named]
    shared = {tenant: [number] * 4000 for number, tenant in enumerate(tenants)}
    pending, running, served = dict.fromkeys(tenants, 0), [], dict.fromkeys(tenants, 0.0)
    bound = QUANTUM + cost(missing=longest) + 4 * workers * cost(output=output)
    now = 0.0
    for _ in range(400):
        for tenant, ids in shared.items():
            while pending[tenant] <= 4 * workers:  # more than can be placed in one go
                # Some tenants' requests share a prefix and are at home on one worker, others' are not.
                prompt = ids[: chance.randrange(100, 4000)] if chance.random() < 0.5 else None
                fleet.dispatcher.add(waiting(chance.randrange(100, longest), prompt=prompt, arrival=now, tenant=tenant))
                pending[tenant] += 1
        for entry, view, placed in fleet.dispatcher.dispatch(now).placed:
            running.append((entry.tenant, view, placed))
            pending[entry.tenant] -= 1
            cached = placed.predicted_tokens
            served[entry.tenant] += (placed.prompt_tokens - cached) + 0.1 * cached
        levels = [[sum(served[tenant] for tenant in named) for named in accounts.values()]]
        levels += [[served[tenant] for tenant in named] for named in accounts.values()]
        assert all(max(level) - min(level) <= bound for level in levels)
        now += 0.1
        tenant, view, placed = running.pop(chance.randrange(len(running)))
        view.admit(placed, placed.predicted_tokens, now)
        view.begin_decode(placed, now)
        view.end(placed, now)
        generated = chance.randrange(1, output + 1)
        fleet.counters.charge(tenant, output=generated)
        served[tenant] += 2 * generated

"""Our routing against readings of others' rules, on virtual workers: ratios that must hold wherever this runs."""

from dataclasses import replace

import pytest

from benchmarks.routing import fairness
from benchmarks.routing.simulation import simulate
from benchmarks.routing.virtual_worker import Job, Speed
from benchmarks.routing.workloads import conversations, hot_prefix, prefix_groups

BLOCK = 400


def fleet(cache_tokens: int, count: int = 4) -> list[Speed]:
    return [Speed(cache_tokens=cache_tokens)] * count


def mean(router: str, jobs: list[Job], speeds: list[Speed], block_size: int = BLOCK, **death: float) -> float:
    return simulate(jobs, speeds, block_size, router, 0, **death).mean


@pytest.mark.parametrize("peer", ["sglang cache_aware", "llm-d precise 2:1:1", "dynamo kv (scale 1)", "least_load"])
def test_prefix_groups_that_nearly_fill_the_caches(peer):
    jobs = prefix_groups(10, 80, BLOCK, seed=1, groups=75)
    assert mean("own prefix", jobs, fleet(150_000)) <= 0.8 * mean(peer, jobs, fleet(150_000))


def test_chats():
    jobs = conversations(10, 80, 100, seed=1)
    assert mean("own prefix", jobs, fleet(300_000), 100) <= 0.9 * mean("sglang cache_aware", jobs, fleet(300_000), 100)


def test_without_events_the_mirrors_do_nearly_as_well():
    jobs = prefix_groups(10, 80, BLOCK, seed=1, groups=75)
    blind = mean("own prefix, no events", jobs, fleet(150_000))
    assert blind <= 1.3 * mean("own prefix", jobs, fleet(150_000))


def test_a_hot_prefix_is_served_by_all():
    jobs = hot_prefix(10, 60, 500, seed=1)
    outcome = simulate(jobs, fleet(300_000), 500, "own prefix", 0)
    assert outcome.hit_rate > 0.6
    assert outcome.mean <= 1.1 * mean("least_load", jobs, fleet(300_000), 500)


def test_all_are_served_though_a_worker_dies():
    jobs = prefix_groups(10, 60, BLOCK, seed=1, groups=75)
    outcome = simulate(jobs, fleet(150_000), BLOCK, "own prefix", 0, death_s=30.0)
    assert len(outcome.ttft_s) == len(jobs)


def test_two_backlogged_tenants_are_served_alike_and_it_costs_next_to_nothing():
    jobs = fairness.arrivals(35, 20, 3, groups=0)
    fair = fairness.run(jobs, 20)
    plain = fairness.run([replace(job, tenant=fairness.MANY) for job in jobs], 20)
    assert fair.backlogged_s > 15
    assert fair.gap <= fair.bound
    assert 0.45 < fair.share < 0.55
    assert fair.tokens >= 0.98 * plain.tokens

"""Compares ways to route, on virtual workers and in virtual time: ours as the router runs it, others' as we read them.

    python -m benchmarks.routing.simulate --conversation conversation.jsonl --synthetic synthetic.jsonl

For each scenario and router: the median over seeds of the mean and 90th percentile of the time to the first token, the
share of prompt tokens that were cached, and our mean as a ratio of the router's, with its range over the seeds.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.routing.peer_rules import RULES
from benchmarks.routing.simulation import Outcome, simulate
from benchmarks.routing.virtual_worker import Job, Speed
from benchmarks.routing.workloads import conversations, hot_prefix, mooncake, prefix_groups

OURS = "own prefix"
WORKERS = 8
TRACE_BLOCK = 512


@dataclass(frozen=True)
class Scenario:
    """What is sent to which workers.

    Attributes:
        jobs: by seed.
        death_s: when worker 0 dies.
    """

    name: str
    jobs: Callable[[int], list[Job]]
    speeds: list[Speed]
    block_size: int
    death_s: float | None = None


def scenarios(conversation: Path | None, synthetic: Path | None) -> Iterator[Scenario]:
    """All of them; those on traces that are not there are left out."""

    def fleet(cache_tokens: int) -> list[Speed]:
        return [Speed(cache_tokens=cache_tokens)] * WORKERS

    if conversation is not None:
        trace = conversation
        for speedup in (1.0, 1.5, 2.0):
            yield Scenario(
                f"conversation {speedup:g}x",
                lambda seed, s=speedup: mooncake(trace, s, seed),
                fleet(1_000_000),
                TRACE_BLOCK,
            )
        yield Scenario(
            "conversation 1.5x, even arrivals",
            lambda seed: mooncake(trace, 1.5, seed, 3.0),
            fleet(1_000_000),
            TRACE_BLOCK,
        )
        usual = Speed(cache_tokens=1_000_000)
        unequal = [
            *[replace(usual, prefill_rate=20_000, step_s=0.01)] * 2,
            *[usual] * 4,
            *[replace(usual, prefill_rate=5_000, step_s=0.025)] * 2,
        ]
        yield Scenario("conversation 1x, unequal workers", lambda seed: mooncake(trace, 1, seed), unequal, TRACE_BLOCK)
        yield Scenario(
            "conversation 1x, a worker dies",
            lambda seed: mooncake(trace, 1, seed),
            fleet(1_000_000),
            TRACE_BLOCK,
            1800.0,
        )
    if synthetic is not None:
        agents = synthetic
        for speedup in (1.0, 1.4):
            yield Scenario(
                f"synthetic {speedup:g}x",
                lambda seed, s=speedup: mooncake(agents, s, seed),
                fleet(500_000),
                TRACE_BLOCK,
            )
    for rate, cache_tokens, name in (
        (20, 150_000, "cache nearly full"), (22, 150_000, "cache nearly full"), (30, 300_000, "cache half full"),
    ):  # fmt: skip
        yield Scenario(
            f"150 prefix groups, {name}, {rate}/s",
            lambda seed, r=rate: prefix_groups(r, 300, 400, seed),
            fleet(cache_tokens),
            400,
        )
    yield Scenario("one hot prefix, 20/s", lambda seed: hot_prefix(20, 300, 500, seed), fleet(300_000), 500)
    yield Scenario("chats of several turns, 20/s", lambda seed: conversations(20, 300, 100, seed), fleet(300_000), 100)


def compare(scenario: Scenario, routers: list[str], seeds: int) -> None:
    """Runs a scenario with each router and prints a row for each."""
    print(f"\n{scenario.name}\n{'router':28} {'mean s':>8} {'p90 s':>8} {'cached':>7}   ours / it (range)")
    runs: dict[str, list[Outcome]] = {router: [] for router in routers}
    for seed in range(seeds):
        jobs = scenario.jobs(seed)
        for router in routers:
            runs[router].append(simulate(jobs, scenario.speeds, scenario.block_size, router, seed, scenario.death_s))
    for router, outcomes in runs.items():
        ratios = sorted(ours.mean / it.mean for ours, it in zip(runs[OURS], outcomes, strict=True))
        mean, p90, hits = (
            statistics.median(of)
            for of in zip(
                *((outcome.mean, outcome.quantile(0.9), outcome.hit_rate) for outcome in outcomes), strict=True
            )
        )
        print(
            f"{router:28} {mean:8.3f} {p90:8.3f} {hits:7.3f}   "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


def main() -> None:
    """Parses the flags and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversation", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--synthetic", type=Path, help="Mooncake's synthetic trace")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="scenarios whose names contain this")
    given = parser.parse_args()
    routers = [rule.name for rule in RULES] + [OURS, f"{OURS}, no events", "own least_load"]
    for scenario in scenarios(given.conversation, given.synthetic):
        if given.only in scenario.name:
            compare(scenario, routers, given.seeds)


if __name__ == "__main__":
    main()

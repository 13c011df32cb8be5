"""The scheduler's own time per step (workload O): plan and settle, without any model.

    python -m benchmarks.scheduling --running 64 256 1024

Every sequence decodes; every few steps one ends and another begins, so that admission, hashing and release are in the
figure too.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable

from protos.prefix import chain_root
from worker.block_pool import BlockPool
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams, Sequence, token_array
from worker.step_plan import Sampled


def make_sequence(chance: random.Random, root: bytes, context: int) -> Sequence:
    """A prompt of about ``context`` tokens whose first quarter is shared by a tenth of all."""
    tokens = token_array()
    tokens.extend([chance.randrange(10)] * (context // 4))
    tokens.extend(chance.randrange(50_000) for _ in range(context - context // 4))
    return Sequence("benchmark", tokens, SamplingParams(temperature=0.0), chance.randrange(64, 512), cache_root=root)


def step_times(running: int, context: int, steps: int, clock: Callable[[], float]) -> list[float]:
    """Seconds of plan and settle of each step by a clock, with ``running`` sequences at once."""
    chance = random.Random(0)
    root = chain_root(b"")
    block_size = 16
    blocks = running * (context + 512) // block_size
    scheduler = Scheduler(BlockPool(blocks), block_size, running, max(8192, running))
    for _ in range(running):
        scheduler.add(make_sequence(chance, root, context))
    times: list[float] = []
    while len(times) < steps:
        while len(scheduler.running) + len(scheduler.waiting) < running:
            scheduler.add(make_sequence(chance, root, context))
        started = clock()
        plan = scheduler.plan()
        planned = clock() - started
        assert plan is not None, "a full scheduler has nothing to do"
        sampled = Sampled([chance.randrange(50_000) for _ in plan.samples])
        started = clock()
        scheduler.settle(plan, sampled)
        settled = clock() - started
        if len(plan.samples) > running * 0.9:  # the first steps, which compute prompts, are another matter
            times.append(planned + settled)
    scheduler.pool.check()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--context", type=int, default=1024, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the thread's time only: on a machine that others use too"
    )
    args = parser.parse_args()
    clock = time.thread_time if args.cpu_time else time.perf_counter
    print(f"{'running':>8} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}")
    for running in args.running:
        gc.collect()
        gc.freeze()  # as a worker does once it is ready
        times = sorted(step_times(running, args.context, args.steps, clock))
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        print(f"{running:>8} {p50 * 1e3:>8.3f} {p99 * 1e3:>8.3f} {times[-1] * 1e3:>8.3f}")


if __name__ == "__main__":
    main()

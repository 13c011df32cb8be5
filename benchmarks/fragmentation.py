"""Internal fragmentation of the paged KV cache under workload T's lengths: allocated slots that hold no token.

    python -m benchmarks.fragmentation --block-size 8 16 32

Blocks are allocated as on any worker, by the scheduler; no model runs. In each step, a slot is

- idle, when it is beyond the last token of its sequence: internal fragmentation.
- early, when it is for a prompt token that a later step computes. Blocks for a whole prompt are taken when it starts.
"""

import argparse
from dataclasses import dataclass

from benchmarks.offline import mixed_requests
from worker.block_pool import BlockPool
from worker.scheduler import Scheduler
from worker.step_plan import Sampled


@dataclass
class Slots:
    """Slots of allocated blocks, summed over the steps of a run; ``most_idle`` is the largest share in one step."""

    steps: int = 0
    allocated: int = 0
    idle: int = 0
    early: int = 0
    most_idle: float = 0.0
    preemptions: int = 0

    def count(self, scheduler: Scheduler) -> None:
        """Adds a step that was just planned."""
        pool = scheduler.pool
        allocated = (pool.num_blocks - pool.num_available) * scheduler.block_size
        tokens = sum(len(seq.tokens) for seq in scheduler.running)
        computed = sum(seq.num_computed for seq in scheduler.running)
        assert computed <= tokens <= allocated, "blocks are shared, or tokens have none"
        self.steps += 1
        self.allocated += allocated
        self.idle += allocated - tokens
        self.early += tokens - computed
        self.most_idle = max(self.most_idle, 1 - tokens / allocated)


def simulate(block_size: int, max_num_seqs: int, cache_tokens: int, requests: int) -> Slots:
    """Runs workload T to its end on a cache of that many tokens."""
    scheduler = Scheduler(BlockPool(cache_tokens // block_size, False), block_size, max_num_seqs, 8192)
    for seq in mixed_requests(requests, 1024):
        scheduler.add(seq)
    slots = Slots()
    while (plan := scheduler.plan()) is not None:
        slots.count(scheduler)
        scheduler.settle(plan, Sampled([0] * len(plan.samples)))
    scheduler.pool.check()
    slots.preemptions = scheduler.num_preemptions
    return slots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, nargs="+", default=[16])
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--cache-tokens", type=int, nargs="+", default=[400_000, 40_000], help="default %(default)s")
    parser.add_argument("--requests", type=int, default=512)
    args = parser.parse_args()
    print(
        f"{'block':>5} {'cache tokens':>12} {'steps':>6} {'preempted':>9} {'idle':>7} {'worst step':>10} {'early':>7}"
    )
    for block_size in args.block_size:
        for cache_tokens in args.cache_tokens:
            slots = simulate(block_size, args.max_num_seqs, cache_tokens, args.requests)
            print(
                f"{block_size:>5} {cache_tokens:>12} {slots.steps:>6} {slots.preemptions:>9} "
                f"{slots.idle / slots.allocated:>7.2%} {slots.most_idle:>10.2%} {slots.early / slots.allocated:>7.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""How other routers choose, as their documentation and sources describe it, on exact block names.

These are our readings of their rules, not their programs. Each is bound at arrival, as theirs are, and is told the
state of the workers of this moment, where theirs ask for it from time to time.
"""

import random
import statistics
from collections import OrderedDict
from collections.abc import Sequence

from benchmarks.routing.virtual_worker import Job, VirtualWorker

Workers = Sequence[VirtualWorker]


class Rule:
    """Chooses a worker for each job when it arrives."""

    name = ""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, job: Job, workers: Workers) -> VirtualWorker:
        """One of ``workers``, which are alive."""
        raise NotImplementedError

    def least(self, workers: Workers) -> VirtualWorker:
        """The worker with the fewest requests, any of equals."""
        load = min(worker.load for worker in workers)
        return self.random.choice([worker for worker in workers if worker.load == load])


class RoundRobinRule(Rule):
    """Each in turn."""

    name = "round_robin"
    _turn = -1

    def choose(self, job: Job, workers: Workers) -> VirtualWorker:
        self._turn += 1
        return workers[self._turn % len(workers)]


class LeastLoadRule(Rule):
    """Fewest requests in flight."""

    name = "least_load"

    def choose(self, job: Job, workers: Workers) -> VirtualWorker:
        return self.least(workers)


class PowerOfTwoRule(Rule):
    """The one of two with fewer requests in flight."""

    name = "power_of_two"

    def choose(self, job: Job, workers: Workers) -> VirtualWorker:
        return self.least(self.random.sample(list(workers), min(2, len(workers))))


class SGLangRule(Rule):
    """``cache_aware`` with the defaults of sglang-router 0.3.2: a tree of what was sent, and a guard on counts."""

    name = "sglang cache_aware"
    THRESHOLD, ABSOLUTE, RELATIVE = 0.3, 64, 1.5
    TREE_CHARACTERS, CHARACTERS_A_TOKEN = 2**26, 4

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._trees: dict[int, OrderedDict[bytes, None]] = {}

    def choose(self, job: Job, workers: Workers) -> VirtualWorker:
        loads = [worker.load for worker in workers]
        chosen = None
        if not (max(loads) - min(loads) > self.ABSOLUTE and max(loads) > self.RELATIVE * min(loads)):
            depths = [self._depth(worker, job.names) for worker in workers]
            deepest = max(depths)
            if job.names and deepest * workers[0].block_size / job.prompt_tokens > self.THRESHOLD:
                holders = [worker for worker, depth in zip(workers, depths, strict=True) if depth == deepest]
                chosen = self.random.choice(holders)
        chosen = chosen or self.least(workers)
        tree = self._trees.setdefault(chosen.number, OrderedDict())
        for name in reversed(job.names):
            tree[name] = None
            tree.move_to_end(name)
        blocks = self.TREE_CHARACTERS // (self.CHARACTERS_A_TOKEN * chosen.block_size)
        while len(tree) > blocks:
            tree.popitem(last=False)
        return chosen

    def _depth(self, worker: VirtualWorker, names: list[bytes]) -> int:
        tree = self._trees.get(worker.number, ())
        for depth, name in enumerate(names):
            if name not in tree:
                return depth
        return len(names)


class AIBrixRule(Rule):
    """``prefix-cache``: the deepest match among workers that are not much busier than the mean."""

    name = "aibrix prefix-cache"
    IMBALANCE = 8

    def choose(self, job: Job, workers: Workers) -> VirtualWorker:
        loads = [worker.load for worker in workers]
        if max(loads) - min(loads) > self.IMBALANCE:
            return self.least(workers)
        limit = statistics.fmean(loads) + statistics.pstdev(loads)
        depths = {worker: worker.depth(job.names) for worker in workers if worker.load <= limit}
        deepest = max(depths.values(), default=0)
        if not deepest:
            return self.least(workers)
        return self.least([worker for worker, depth in depths.items() if depth == deepest])


class LlmDRule(Rule):
    """llm-d with exact events: prefix 2, queue 1, free KV 1; the highest sum."""

    name = "llm-d precise 2:1:1"

    def choose(self, job: Job, workers: Workers) -> VirtualWorker:
        queues = [len(worker.waiting) for worker in workers]
        low, span = min(queues), max(queues) - min(queues)
        sums = []
        for worker, queue in zip(workers, queues, strict=True):
            prefix = worker.depth(job.names) / len(job.names) if job.names else 0.0
            idle = 1.0 - (queue - low) / span if span else 1.0
            sums.append(2 * prefix + idle + 1 - worker.used_blocks / worker.num_blocks)
        best = max(sums)
        return self.random.choice([worker for worker, total in zip(workers, sums, strict=True) if total == best])


class DynamoRule(Rule):
    """NVIDIA Dynamo's KV router: tokens to compute before and for the request, in blocks, plus blocks in use."""

    name = "dynamo kv (scale 1)"

    def choose(self, job: Job, workers: Workers) -> VirtualWorker:
        costs = []
        for worker in workers:
            missing = worker.queued_prefill_tokens + job.prompt_tokens - worker.depth(job.names) * worker.block_size
            waiting = sum(-(-other.prompt_tokens // worker.block_size) for other in worker.waiting)
            costs.append(max(0, missing) / worker.block_size + worker.used_blocks + waiting)
        best = min(costs)
        return self.random.choice([worker for worker, cost in zip(workers, costs, strict=True) if cost == best])


RULES = (RoundRobinRule, LeastLoadRule, PowerOfTwoRule, SGLangRule, AIBrixRule, LlmDRule, DynamoRule)

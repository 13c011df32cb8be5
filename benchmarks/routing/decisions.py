"""What a decision costs the router: time for one long prompt, and what the index of all workers' blocks takes.

python -m benchmarks.routing.decisions
"""

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable

from protos import worker_pb2
from protos.prefix import block_hashes
from router.routing.cache_mirror import CacheMirror
from router.routing.dispatcher import Dispatcher
from router.routing.fair_queue import FairQueue
from router.routing.policies import Prefix
from router.routing.prefix_index import PrefixIndex
from router.routing.tenant_counters import TenantCounters
from router.routing.throughput import Throughput
from router.routing.waiting import Waiting
from router.routing.worker_view import Placed, WorkerView

BLOCK = 16
EPOCH = 1


class Decisions:
    """Workers whose caches are full, half of them with half of the same prompts' blocks.

    Args:
        workers: how many.
        tokens: of each prompt.
        prompts: that workers know.
    """

    def __init__(self, workers: int, tokens: int, prompts: int) -> None:
        self.chance = random.Random(0)
        self.index = PrefixIndex()
        self.dispatcher = Dispatcher(self.index, FairQueue(TenantCounters()), Prefix())
        self.prompts = [self.chance.randbytes(4 * tokens) for _ in range(prompts)]
        self.tokens = tokens
        hello = worker_pb2.Hello(block_size=BLOCK, num_blocks=60_000, max_slots=10_000, max_num_batched_tokens=10**9)
        chains = [block_hashes(prompt, BLOCK) for prompt in self.prompts]
        for number in range(workers):
            cache = CacheMirror(self.index, number, hello.num_blocks, EPOCH)
            known = b"".join(b"".join(chain[: self.chance.randrange(len(chain))]) for chain in chains)
            events = worker_pb2.KvEvents(epoch=EPOCH, sequence=1, snapshot=True, cleared=True, stored=known)
            cache.apply(events, 0.0)
            self.dispatcher.views.append(WorkerView(str(number), number, hello, cache, Throughput(8192)))

    def time_one(self) -> tuple[float, float, float]:
        """Seconds to name the blocks of a prompt, to find and score all workers, and to queue and place it."""
        prompt = self.chance.choice(self.prompts)
        began = time.perf_counter()
        names = block_hashes(prompt, BLOCK)
        named = time.perf_counter()
        entry = Waiting(names, self.tokens, 0.0, BLOCK, affinity=names[0])
        self.dispatcher.choose_now(entry, 0.0)
        chosen = time.perf_counter()
        self.dispatcher.add(entry)
        ((_, view, placed),) = self.dispatcher.dispatch(0.0).placed
        done = time.perf_counter()
        self._finish(view, placed)
        return named - began, chosen - named, done - chosen

    @staticmethod
    def _finish(view: WorkerView, placed: Placed) -> None:
        view.admit(placed, placed.predicted_tokens, 0.0)
        view.begin_decode(placed, 0.0)
        view.end(placed, 0.0)


def report(what: str, seconds: list[float]) -> None:
    """Prints the median and the 99th percentile."""
    ordered = sorted(seconds)
    median, late = statistics.median(ordered), ordered[int(0.99 * len(ordered))]
    print(f"{what:36} p50 {1e3 * median:7.3f} ms   p99 {1e3 * late:7.3f} ms")


def rate(what: str, operations: int, work: Callable[[], object]) -> None:
    """Prints how many operations a second some work makes; the best of five tries."""
    best = min(_timed(work) for _ in range(5))
    print(f"{what:36} {operations / best / 1e6:7.1f} M blocks/s")


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_index(blocks: int) -> None:
    """Prints the index's speed and size."""
    chance = random.Random(1)
    names = [chance.randbytes(16) for _ in range(blocks)]
    index = PrefixIndex()
    rate("index: add", blocks, lambda: index.add(names, 0))
    rate("index: match", blocks, lambda: index.match(names))
    rate("index: remove and add", 2 * blocks, lambda: (index.remove(names, 0), index.add(names, 0)))

    def size_of(fill: Callable[[list[bytes]], object]) -> float:
        tracemalloc.start()
        kept = fill([chance.randbytes(16) for _ in range(blocks)])
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert kept is not None
        return size / blocks

    def fill_index(fresh: list[bytes]) -> object:
        filled = PrefixIndex()
        filled.add(fresh, 0)
        return filled

    def fill_mirror(fresh: list[bytes]) -> object:
        mirror = CacheMirror(PrefixIndex(), 0, blocks, EPOCH)
        mirror.apply(worker_pb2.KvEvents(epoch=EPOCH, sequence=1, snapshot=True, cleared=True), 0.0)
        mirror.expect(fresh, 0.0)
        mirror.apply(worker_pb2.KvEvents(epoch=EPOCH, sequence=2, stored=b"".join(fresh)), 0.0)
        return mirror

    for what, fill in (("index, names included", fill_index), ("index and a worker's mirror", fill_mirror)):
        print(f"{what:36} {size_of(fill):7.0f} bytes a block")


def main() -> None:
    """Parses the flags and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=500_000)
    given = parser.parse_args()
    decisions = Decisions(given.workers, given.tokens, 100)
    for _ in range(50):
        decisions.time_one()
    named, chosen, noted = zip(*(decisions.time_one() for _ in range(given.decisions)), strict=True)
    print(f"{given.tokens} tokens, {given.workers} workers, {given.decisions} decisions")
    report("name the blocks", list(named))
    report("look up and score all workers", list(chosen))
    report("the decision: both", [a + b for a, b in zip(named, chosen, strict=True)])
    report("then queue, place and note it", list(noted))
    measure_index(given.blocks)


if __name__ == "__main__":
    main()

"""What the router knows of one worker when it decides: its cache, its speed, and the sequences that it was given."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from protos import worker_pb2
from router.routing.cache_mirror import CacheMirror
from router.routing.throughput import PRIOR_PREFILL_RATE, Throughput

# From a worker's report to the next sequence's arrival there, generously.
ROUND_TRIP_S = 0.005
# Rates this close, as a ratio, are taken for equal.
EQUAL_RATES = 1.25


@dataclass(slots=True, eq=False)
class Placed:
    """A sequence that was given to a worker.

    Attributes:
        names: of its prompt's full blocks.
        prompt_tokens, predicted_tokens: how long its prompt is, with output to be computed again, and how much of it
            was believed to be cached there.
        rest: prompt tokens still to be computed, as far as the router knows.
        reason: why this worker.
        placed_at, queued_at, admitted_at, first_token_at: seconds; None: not yet.
        cached_tokens: what was cached indeed; known when admitted.
    """

    names: Sequence[bytes]
    prompt_tokens: int
    predicted_tokens: int
    rest: int
    reason: str
    queued_at: float
    placed_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    cached_tokens: int | None = None


class WorkerView:
    """One worker, from its Hello to the end of its stream.

    Args:
        address: what tells it from the others, also after a restart.
        number: its number in the index.
        hello: its first message.
        cache: the mirror of its prefix cache.
        throughput: its speed.

    Attributes:
        accepting: whether it takes sequences at all; such a worker may be worth waiting for.
        open: whether it has a slot now.
        backlog: prompt tokens that it was given and has not computed.
        next_end_steps: steps until one of its sequences ends, by what is expected of outputs.
        load: what it said of itself last.
        prefix_cache_queries, prefix_cache_hits: prompt tokens of the sequences that it began to run, and how many of
            them it had cached.
        prefill_rate, typical_rate: prompt tokens a second, of this worker and of most; see ``level_rates``.
    """

    def __init__(
        self, address: str, number: int, hello: worker_pb2.Hello, cache: CacheMirror, throughput: Throughput
    ) -> None:
        self.address = address
        self.number = number
        self.cache = cache
        self.throughput = throughput
        self.block_size = hello.block_size or 1
        self.num_blocks = hello.num_blocks
        self.max_slots = hello.max_slots
        self.max_num_seqs = hello.max_num_seqs or hello.max_slots
        self.step_budget = hello.max_num_batched_tokens
        self.accepting = True
        self.open = True
        self.running = 0
        self.prefilling: set[Placed] = set()
        self.backlog = 0
        self.next_end_steps = 0.0
        self.load = worker_pb2.Load(free_blocks=hello.num_blocks)
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self.prefill_rate = self.typical_rate = throughput.prefill_rate
        self._available_blocks = hello.num_blocks
        # Blocks of sequences that the last report does not count yet.
        self._promised_blocks = 0

    @property
    def decoding(self) -> int:
        """Sequences that have their first token."""
        return self.running - len(self.prefilling)

    @property
    def has_slot(self) -> bool:
        """Whether it may be given another sequence, however much it has to compute."""
        return self.open and self.running < self.max_slots

    @property
    def has_room(self) -> bool:
        """Whether it can start another sequence soon.

        Its reports count what it has not planned yet. One that plans a step ahead is kept busy by one step's budget.
        """
        limit = self.step_budget + ROUND_TRIP_S * self.prefill_rate
        return self.accepting and self.has_slot and self.backlog < limit

    def fits(self, blocks: int) -> bool:
        """Whether so many more blocks can be had without evicting what runs. A worker that runs nothing must cope."""
        return not self.running or self._promised_blocks + blocks <= self._available_blocks

    def memory_use(self, blocks: int) -> float:
        """The share of blocks in use, with so many more."""
        used = self.num_blocks - self._available_blocks + self._promised_blocks + blocks
        return used / self.num_blocks if self.num_blocks else 0.0

    def place(self, placed: Placed) -> None:
        """The worker is given a sequence."""
        self.running += 1
        self.prefilling.add(placed)
        self.backlog += placed.rest
        self._promised_blocks += self._blocks(placed.rest)
        self.cache.expect(placed.names, placed.placed_at)

    def admit(self, placed: Placed, cached_tokens: int, now: float) -> None:
        """It began to run, with so many tokens of its prompt cached."""
        placed.admitted_at, placed.cached_tokens = now, cached_tokens
        self.prefix_cache_queries += placed.prompt_tokens
        self.prefix_cache_hits += cached_tokens
        self._promised_blocks -= self._blocks(placed.prompt_tokens - placed.predicted_tokens)
        self._set_rest(placed, max(0, placed.prompt_tokens - cached_tokens))

    def begin_decode(self, placed: Placed, now: float) -> None:
        """Its first token came."""
        placed.first_token_at = now
        self._leave_prefill(placed)
        self.cache.computed(placed.names, now)

    def end(self, placed: Placed, now: float) -> None:
        """It ended, whichever way."""
        if placed.admitted_at is None:
            self._promised_blocks -= self._blocks(placed.prompt_tokens - placed.predicted_tokens)
        self._leave_prefill(placed)
        self.running -= 1
        self.cache.release(placed.names, now, computed=placed.first_token_at is not None)

    def report(self, step: int, load: worker_pb2.Load) -> None:
        """What it says of itself after a step. Nothing that it has waits longer than it says."""
        self.load = load
        self.throughput.observe(step, load)
        self._available_blocks = load.free_blocks + load.cached_blocks
        left = load.queued_prefill_tokens
        admitted = [placed for placed in self.prefilling if placed.admitted_at is not None]
        excess = sum(placed.rest for placed in admitted) - left
        for placed in sorted(admitted, key=lambda placed: placed.placed_at):  # they are computed in this order
            if excess <= 0:
                break
            done = min(excess, placed.rest)
            self._set_rest(placed, placed.rest - done)
            excess -= done

    def _leave_prefill(self, placed: Placed) -> None:
        if placed in self.prefilling:
            self.prefilling.remove(placed)
            self._set_rest(placed, 0)

    def _set_rest(self, placed: Placed, rest: int) -> None:
        self.backlog += rest - placed.rest
        placed.rest = rest

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def level_rates(views: Sequence[WorkerView]) -> None:
    """Decides how fast each worker counts as.

    Workers that are about as fast as most get one rate: else what was measured of equal machines, never quite the same,
    would send everything to one of them while nothing else tells them apart. Of whom nothing is known is one of most.
    """
    measured = [view.throughput.prefill_rate for view in views if view.throughput.measured]
    typical = statistics.median_low(measured) if measured else PRIOR_PREFILL_RATE
    for view in views:
        view.typical_rate = typical
        own = view.throughput.prefill_rate if view.throughput.measured else typical
        view.prefill_rate = typical if typical / EQUAL_RATES <= own <= typical * EQUAL_RATES else own

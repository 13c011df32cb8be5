"""What speaks against a worker for a request, in seconds. The least wins.

    wait     prompt tokens that the worker has yet to compute / its rate
    work     missing tokens / its rate + (miss weight - 1) * missing tokens / the rate of most workers
    decode   missing tokens / its rate * its decoding sequences / DECODES_A_DOUBLING
    memory   MEMORY_WEIGHT * what is above MEMORY_LIMIT of its blocks, squared, in units of 1 - MEMORY_LIMIT

A missing token weighs more than the time it takes: computing it also evicts something, which some worker will have to
compute again. With a weight of 1 each request gets its own earliest first token, and prefixes spread until none is
cached well; from 4 to 16 the outcome is flat (benchmarks/routing). As long as a cache has room nothing is evicted, and
little more than 1 is right: a prefix that many ask for is copied at once.
"""

from dataclasses import dataclass

from router.routing.worker_view import WorkerView

MISS_WEIGHT = 4.0
MISS_WEIGHT_WITH_ROOM = 1.25
DECODES_A_DOUBLING = 16
MEMORY_LIMIT = 0.9
MEMORY_WEIGHT_S = 1.0
# Scores that differ by less are equal.
TIE = 0.01


@dataclass(frozen=True, slots=True)
class Score:
    """The parts, in seconds."""

    wait: float
    work: float
    decode: float
    memory: float

    @property
    def total(self) -> float:
        """What is compared."""
        return self.wait + self.work + self.decode + self.memory


def score(view: WorkerView, prompt_tokens: int, cached_tokens: int, reserved: int = 0) -> Score:
    """What speaks against a worker.

    Args:
        view: the worker.
        prompt_tokens: of the request.
        cached_tokens: those that the worker is believed to have.
        reserved: prompt tokens that others will bring before, beside the worker's backlog.
    """
    rate = view.prefill_rate
    missing = prompt_tokens - cached_tokens
    missing_s = missing / rate
    weight = MISS_WEIGHT_WITH_ROOM if view.cache.has_room else MISS_WEIGHT
    excess = view.memory_use(-(-missing // view.block_size)) - MEMORY_LIMIT
    return Score(
        wait=(view.backlog + reserved) / rate,
        work=missing_s + (weight - 1) * missing / view.typical_rate,
        decode=missing_s * view.decoding / DECODES_A_DOUBLING,
        memory=MEMORY_WEIGHT_S * (excess / (1 - MEMORY_LIMIT)) ** 2 if excess > 0 else 0.0,
    )


def first_token_s(view: WorkerView, prompt_tokens: int, cached_tokens: int) -> float:
    """Seconds until a worker could give a request its first token, if it got nothing else meanwhile."""
    return (view.backlog + prompt_tokens - cached_tokens) / view.prefill_rate

"""How long outputs are, and so when a worker will have a place again: what decodes holds its place to its end."""

from collections.abc import Iterable, Sequence

from router.routing.worker_view import WorkerView

# Assumed until outputs have ended.
PRIOR_OUTPUT_TOKENS = 256.0
# What one more output weighs in the average.
_WEIGHT = 0.05


class OutputLengths:
    """The average over the outputs that ended of late.

    Attributes:
        typical: tokens.
    """

    def __init__(self) -> None:
        self.typical = PRIOR_OUTPUT_TOKENS

    def ended(self, tokens: int) -> None:
        """An output ended after so many tokens."""
        self.typical += _WEIGHT * (tokens - self.typical)

    def until_next_end(self, running: Sequence[tuple[int, int]]) -> float:
        """Steps until one of some outputs ends.

        Args:
            running: of each one, the tokens that it has and those that it may have.

        An output that is longer than most says nothing of its end: of n of them, one ends every ``typical / n`` steps.
        """
        expected = (
            min(most - tokens, self.typical - tokens if tokens < self.typical else self.typical / len(running))
            for tokens, most in running
        )
        return max(0.0, min(expected, default=0.0))

    def expected(self, most: int) -> float:
        """Tokens to be expected of an output that may have at most so many."""
        return min(most, self.typical)

    def next_place_s(self, views: Iterable[WorkerView], waiting: float) -> float:
        """Seconds until a worker has a place for who comes after others. 0 where one has a slot.

        Args:
            views: workers that take sequences.
            waiting: output tokens to be expected of those others.
        """
        views = list(views)
        if not views or any(view.has_slot for view in views):
            return 0.0
        before = waiting + self.typical * sum(max(0, view.running - view.max_num_seqs) for view in views)
        tokens_a_second = sum(view.max_num_seqs / view.throughput.step_s for view in views)
        return min(view.next_end_steps * view.throughput.step_s for view in views) + before / tokens_a_second

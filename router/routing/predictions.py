"""How well the router foretells what workers have cached; counted for whoever shows it."""

from dataclasses import dataclass


@dataclass(slots=True)
class PredictionCounters:
    """Counted up since the start.

    Attributes:
        sequences: those of which a worker told how much it had cached.
        predicted_tokens, cached_tokens: what was expected to be cached, and what was.
        missed_tokens: expected, but not cached.
        unexpected_tokens: cached, but not expected.
    """

    sequences: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    missed_tokens: int = 0
    unexpected_tokens: int = 0

    def observe(self, predicted_tokens: int, cached_tokens: int) -> None:
        """One more sequence began to run."""
        self.sequences += 1
        self.predicted_tokens += predicted_tokens
        self.cached_tokens += cached_tokens
        self.missed_tokens += max(0, predicted_tokens - cached_tokens)
        self.unexpected_tokens += max(0, cached_tokens - predicted_tokens)

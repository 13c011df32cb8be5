"""Keeps work from a worker that loses it again and again, and tries it with one sequence before it is trusted again."""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Losses in a row after which a worker gets nothing for a while.
MAX_LOSSES = 3
FIRST_PAUSE_S = 5.0
LAST_PAUSE_S = 60.0
# A sequence may be long: with so many batches of tokens, a probe has succeeded as well.
PROBE_BATCHES = 64


@dataclass(slots=True)
class CircuitBreaker:
    """One worker's record, which outlives its streams and processes: who crashes at once comes back as a new process.

    Closed, it admits everything. ``MAX_LOSSES`` losses of work without a success between open it: it admits nothing.
    After a pause, which doubles each time, it is half open: one sequence may run, the probe. Its success closes the
    breaker, its loss opens it again.

    Attributes:
        clock: seconds that only grow.
    """

    clock: Callable[[], float] = time.monotonic
    _losses: int = 0
    _pause: float = FIRST_PAUSE_S
    _open_until: float | None = None
    _batches: int = 0

    def admits(self, running: int) -> bool:
        """Whether the worker may get one more sequence beside those that it runs."""
        if self._open_until is None:
            return True
        return running == 0 and self.clock() >= self._open_until

    @property
    def pause(self) -> float:
        """Seconds until the worker may get work; 0 when it may now."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self.clock())

    def lost(self) -> bool:
        """The worker lost what it ran. Returns whether that opened the breaker."""
        self._losses += 1
        self._batches = 0
        if self._losses < MAX_LOSSES:
            return False
        if self._open_until is not None:
            self._pause = min(2 * self._pause, LAST_PAUSE_S)
        self._open_until = self.clock() + self._pause
        return True

    def progressed(self) -> None:
        """The worker delivered tokens."""
        if self._losses:
            self._batches += 1
            if self._batches >= PROBE_BATCHES:
                self.succeeded()

    def succeeded(self) -> None:
        """A sequence came to its end as it should."""
        self._losses = self._batches = 0
        self._pause = FIRST_PAUSE_S
        self._open_until = None

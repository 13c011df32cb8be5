"""How long steps take, for routers that must tell a long step from one that hangs."""

import time

_WEIGHT = 1 / 16
# The longest step is forgotten slowly: its share after a thousand shorter ones is a third.
_FADE = 0.999


class StepClock:
    """The running step's age and what is usual. Written by the engine's thread, read by any.

    Attributes:
        typical: moving average of the steps' durations, in seconds.
        longest: duration of the longest step of late, in seconds.
        busy: seconds that all steps together took.
    """

    def __init__(self) -> None:
        self.typical = 0.0
        self.longest = 0.0
        self.busy = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """A step begins."""
        self._started = time.monotonic()

    def stop(self) -> None:
        """It has ended."""
        assert self._started is not None
        duration = time.monotonic() - self._started
        self._started = None
        self.busy += duration
        self.typical += (duration - self.typical) * _WEIGHT
        self.longest = max(duration, self.longest * _FADE)

    @property
    def age(self) -> float:
        """Seconds that the running step has taken so far; 0 between steps."""
        started = self._started
        return 0.0 if started is None else time.monotonic() - started

"""How long each phase of a worker's start took. Knows no torch."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_TOLD = 0.01


class StartPhases:
    """The clock of a start. Each phase is logged when it ends, unless it took no time worth telling.

    Attributes:
        seconds: of each phase, in the order in which they ended; of one that came several times, their sum.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start began, in which all phases are."""
        return time.monotonic() - self._began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs within it is the phase. One that raises is not counted; phases do not nest."""
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if seconds >= _TOLD:
            logger.info("start-up: %s took %.2f s", name, seconds)

    def describe(self) -> str:
        """All phases in one line, for people."""
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items() if seconds >= _TOLD)

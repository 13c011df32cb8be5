"""How far a slow phase of the start is."""

import logging
import sys

from tqdm import tqdm

logger = logging.getLogger(__name__)


class Progress:
    """A progress bar on a terminal, a line for each tenth elsewhere."""

    def __init__(self, what: str, unit: str) -> None:
        self._what = what
        self._bar: tqdm[None] | None = tqdm(desc=what, unit=" " + unit, leave=False) if sys.stderr.isatty() else None
        self._tenth = 0

    def update(self, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` are through."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
        elif done * 10 // total > self._tenth:
            self._tenth = done * 10 // total
            logger.info("%s %3d%%", self._what, self._tenth * 10)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

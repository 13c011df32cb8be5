"""What becomes of a choice whose worker was lost: it goes on elsewhere, unless workers die of it.

The router has all that a worker knew of it (prompt, output so far, seed), so a loss costs time and nothing else. Two
bounds keep one request from harming the fleet: attempts that bring its output no further, and crashes among them.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from typing import TYPE_CHECKING

from router.errors import RequestQuarantined, Unavailable

if TYPE_CHECKING:
    from router.request import Choice, Request

logger = logging.getLogger(__name__)

# A request is suspected of what two workers died of; a third is not risked.
MAX_CRASHES = 2
# Output tokens that a worker may have computed before it crashed and the router has not seen. An attempt must get
# further than this for its end to count as another one than the last attempt's.
UNSEEN_TOKENS = 8
# Clients send a failed request again at once; for this long it is refused before a worker sees it.
QUARANTINE_S = 60.0
_MAX_QUARANTINED = 256


class Loss(Enum):
    """How a worker was lost."""

    # Its process or its engine ended, or its connection broke: from outside these look alike.
    CRASHED = auto()
    # It did not answer, or contradicted itself.
    FAILED = auto()
    # It was shut down, or is no longer one of ours.
    LEFT = auto()


@dataclass(slots=True)
class Attempts:
    """The attempts at a choice, in a row, that ended by a loss and brought its output no further.

    Attributes:
        lost: how many they are.
        crashed: how many of them ended by a crash.
        num_output: output tokens at the end of the first of them.
    """

    lost: int = 0
    crashed: int = 0
    num_output: int = 0

    def add(self, loss: Loss, num_output: int) -> None:
        """One more was lost, with so many output tokens known."""
        if not self.lost or num_output > self.num_output + UNSEEN_TOKENS:
            self.lost = self.crashed = 0
            self.num_output = num_output
        if loss is not Loss.LEFT:
            self.lost += 1
            self.crashed += loss is Loss.CRASHED


class Recovery:
    """Takes lost choices.

    Args:
        max_attempts: most attempts in a row that bring a choice's output no further.
        put_back: gives a choice its turn again.
        clock: seconds that only grow.
    """

    def __init__(
        self, max_attempts: int, put_back: "Callable[[Choice], None]", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_attempts = max_attempts
        self._put_back = put_back
        self._clock = clock
        # When each one ends, by the prompt's digest; oldest first.
        self._quarantined: OrderedDict[bytes, float] = OrderedDict()

    def check(self, request: "Request") -> None:
        """Raises RequestQuarantined when workers died of this prompt a short time ago."""
        end = self._quarantined.get(_digest(request)) if self._quarantined else None
        if end is not None and self._clock() < end:
            raise RequestQuarantined(f"{MAX_CRASHES} workers crashed while they ran this prompt; it is not run again")

    def lost(self, choice: "Choice", loss: Loss, worker: str) -> None:
        """The worker that ran a choice is lost, or gave it up. No link may hold the choice any more."""
        request, attempts = choice.request, choice.attempts
        attempts.add(loss, len(choice.token_ids))
        if request.ended or choice.end_if_complete():
            return
        if attempts.crashed >= MAX_CRASHES:
            self._quarantine(request)
            request.fail(
                RequestQuarantined(f"{MAX_CRASHES} workers crashed while they ran this request; it is not run again")
            )
        elif attempts.lost >= self._max_attempts:
            request.fail(Unavailable(f"{attempts.lost} workers were lost while they ran this request; try again later"))
        else:
            self._put_back(choice)
            return
        logger.error(
            "request %s: given up after %d attempts, %d crashes; the last worker was %s",
            *(request.id, attempts.lost, attempts.crashed, worker),
        )

    def _quarantine(self, request: "Request") -> None:
        digest = _digest(request)
        self._quarantined.pop(digest, None)
        while len(self._quarantined) >= _MAX_QUARANTINED:
            self._quarantined.popitem(last=False)
        self._quarantined[digest] = self._clock() + QUARANTINE_S


def _digest(request: "Request") -> bytes:
    return blake2b(request.prompt, digest_size=16).digest()

"""What becomes of a choice whose worker was lost: it goes on elsewhere, unless workers die of it.

The router has all that a worker knew of it (prompt, output so far, seed), so a loss costs time and nothing else. Two
bounds keep one request from harming the fleet: attempts that bring its output no further, and crashes among them. A
crash is held against a choice only by evidence: its worker had begun to run it, the process is gone, and nothing that
ran elsewhere was lost in the same moment. Until that is known, a choice that may not be risked again is held back.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from router.errors import RequestQuarantined, Unavailable
from router.events import SHUT_DOWN, RouterEvents
from router.worker_loss import LEASE_S, Loss, LossLog, Verdict, WorkerLoss

if TYPE_CHECKING:
    from router.request import Choice, Request

logger = logging.getLogger(__name__)

# A request is suspected of what two workers died of; a third is not risked.
MAX_CRASHES = 2
# Output tokens that a worker may have computed before it crashed and the router has not seen. An attempt must get
# further than this for its end to count as another one than the last attempt's.
UNSEEN_TOKENS = 4
# Clients send a failed request again at once; for this long it is refused before a worker sees it.
QUARANTINE_S = 60.0
_MAX_QUARANTINED = 256


@dataclass(slots=True)
class Attempts:
    """The attempts at a choice, in a row, that ended by a loss and brought its output no further.

    Attributes:
        num_output: output tokens at the end of the first of them.
    """

    num_output: int = 0
    # Each with whether the worker had begun to run the choice.
    _ended: list[tuple[WorkerLoss, bool]] = field(default_factory=list)

    def add(self, loss: WorkerLoss, *, begun: bool, num_output: int) -> None:
        """One more was lost, with so many output tokens known."""
        self._ended = [(past, ran) for past, ran in self._ended if past.verdict is not Verdict.CUT]
        if not self._ended or num_output > self.num_output + UNSEEN_TOKENS:
            self._ended.clear()
            self.num_output = num_output
        self._ended.append((loss, begun))

    @property
    def lost(self) -> int:
        """How many they are. A cut connection is none; nor is, of one outage, what was sent to those already lost."""
        counted = [(loss.outage, begun) for loss, begun in self._ended if loss.verdict is not Verdict.CUT]
        ran = [outage for outage, begun in counted if begun]
        return len(ran) + len({id(outage) for outage, _ in counted if outage not in ran})

    @property
    def crashed(self) -> int:
        """How many of them ended by a crash of which the choice is suspected."""
        return sum(loss.verdict is Verdict.DIED for loss in self._suspicious())

    @property
    def suspected(self) -> int:
        """``crashed``, and those that may turn out so."""
        return len(self._suspicious())

    @property
    def hops(self) -> bool:
        """Whether it was lost twice in an outage that is not over: it would be sent to what is about to be lost."""
        return sum(not loss.outage.over and loss.verdict is not Verdict.CUT for loss, _ in self._ended) > 1

    @property
    def settled(self) -> bool:
        """Whether it is known what each of them was."""
        return all(loss.verdict is not Verdict.OPEN for loss, _ in self._ended)

    def _suspicious(self) -> list[WorkerLoss]:
        ran = [loss for loss, begun in self._ended if begun]
        return [
            loss
            for loss in ran
            if loss.verdict in (Verdict.OPEN, Verdict.DIED)
            # A worker that was lost in the same moment, and had not begun to run it, had another cause.
            and loss.outage.workers <= {other.worker for other in ran if other.outage is loss.outage}
        ]


class Recovery:
    """Takes lost choices.

    Args:
        max_attempts: most attempts in a row that bring a choice's output no further.
        put_back: gives a choice its turn again.
        dispatch: looks for workers for those that were put back later than at their loss.
        events: are counted.
        lease: seconds after which a worker that has not come back is taken for dead.
        clock: seconds that only grow.
        call_later: see ``LossLog``.
    """

    def __init__(
        self,
        max_attempts: int,
        put_back: "Callable[[Choice], None]",
        dispatch: Callable[[], None],
        events: RouterEvents,
        lease: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._max_attempts = max_attempts
        self._put_back = put_back
        self._dispatch = dispatch
        self._events = events
        self._clock = clock
        self._losses = LossLog(self._review, self._count, lease, clock, call_later)
        # Choices that wait until it is known what became of their workers, the oldest first.
        self._held: dict[Choice, None] = {}
        # When each one ends, by the prompt's digest; oldest first.
        self._quarantined: OrderedDict[bytes, float] = OrderedDict()

    def check(self, request: "Request") -> None:
        """Raises RequestQuarantined when workers died of this prompt a short time ago."""
        end = self._quarantined.get(_digest(request)) if self._quarantined else None
        if end is not None and self._clock() < end:
            raise RequestQuarantined(f"{MAX_CRASHES} workers crashed while they ran this prompt; it is not run again")

    def worker_lost(self, worker: str, epoch: int, loss: Loss) -> WorkerLoss | None:
        """A worker (its address) is lost. To be told before its choices are. None: there is nothing to count."""
        if loss is Loss.LEFT:
            self._events.losses.labels(SHUT_DOWN).inc()
            return None
        return self._losses.note(worker, epoch, loss)

    def worker_returned(self, worker: str, epoch: int) -> None:
        """A worker is there, for the first time or again. ``capacity_changed`` is to follow."""
        self._losses.returned(worker, epoch)

    def lost(self, choice: "Choice", loss: WorkerLoss | None, *, begun: bool) -> None:
        """The worker that had a choice is lost, or gave it up. No link may hold the choice any more.

        Args:
            choice: the choice.
            loss: what ``worker_lost`` said.
            begun: whether that worker told of a first step or token of it.
        """
        if loss is not None:
            choice.attempts.add(loss, begun=begun, num_output=len(choice.token_ids))
        self._decide(choice)

    def discard(self, request: "Request") -> None:
        """The call is over: nothing of it is held."""
        for choice in request.choices:
            self._held.pop(choice, None)

    def _decide(self, choice: "Choice") -> None:
        request, attempts = choice.request, choice.attempts
        if request.ended or choice.end_if_complete():
            return
        if attempts.crashed >= MAX_CRASHES:
            self._quarantine(request)
            request.fail(
                RequestQuarantined(f"{MAX_CRASHES} workers crashed while they ran this request; it is not run again")
            )
        elif self._must_wait(attempts):
            self._held[choice] = None
            return
        elif attempts.lost >= self._max_attempts:
            request.fail(Unavailable(f"{attempts.lost} workers were lost while they ran this request; try again later"))
        else:
            self._put_back(choice)
            return
        logger.error("request %s: given up after %d attempts, %d crashes", request.id, attempts.lost, attempts.crashed)

    def _count(self, verdict: Verdict) -> None:
        self._events.losses.labels(verdict.name.lower()).inc()

    def _must_wait(self, attempts: Attempts) -> bool:
        """Whether what became of its workers must be known first."""
        doubtful = attempts.lost >= self._max_attempts and not attempts.settled
        return doubtful or attempts.suspected >= MAX_CRASHES or attempts.hops

    def _review(self) -> None:
        """More is known of lost workers."""
        if not self._held:
            return
        held, self._held = self._held, {}
        for choice in held:
            self._decide(choice)
        if len(self._held) < len(held):
            self._dispatch()

    def _quarantine(self, request: "Request") -> None:
        self._events.quarantines.inc()
        digest = _digest(request)
        self._quarantined.pop(digest, None)
        while len(self._quarantined) >= _MAX_QUARANTINED:
            self._quarantined.popitem(last=False)
        self._quarantined[digest] = self._clock() + QUARANTINE_S


def _digest(request: "Request") -> bytes:
    return blake2b(request.prompt, digest_size=16).digest()

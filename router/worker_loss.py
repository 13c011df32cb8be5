"""What is known of lost workers: whether a process died or a connection was cut, and who was lost with whom.

From outside both look alike at first. It shows when the worker comes back: with the epoch that it had, nothing died.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

# Workers lost within so many seconds were lost by one cause, which none of their requests need be.
OUTAGE_S = 1.0
# A process that has not come back for so long is gone.
LEASE_S = 15.0


class Loss(Enum):
    """How a worker was lost."""

    # It said that its engine failed.
    CRASHED = auto()
    # Its connection broke: its process ended, or something between it and the router did.
    BROKEN = auto()
    # It did not answer, contradicted itself, or ended the stream.
    FAILED = auto()
    # It was shut down. Nobody is to blame, and nothing is counted.
    LEFT = auto()


class Verdict(Enum):
    """What a loss turned out to be."""

    # Not known yet.
    OPEN = auto()
    # The process is gone, or its engine.
    DIED = auto()
    # The same process came back.
    CUT = auto()
    # It is to blame itself.
    FAILED = auto()


@dataclass(slots=True, eq=False)
class Outage:
    """Workers that were lost in the same moment, by address. ``over``: no more will join them."""

    workers: set[str] = field(default_factory=set)
    over: bool = False


@dataclass(slots=True, eq=False)
class WorkerLoss:
    """One loss of one worker.

    Attributes:
        worker: its address.
        epoch: its process's.
        at: seconds.
        outage: what else was lost then.
        gone: whether its process or engine is known to be gone. Not a verdict before the outage is over.
    """

    worker: str
    epoch: int
    at: float
    outage: Outage
    gone: bool = False
    verdict: Verdict = Verdict.OPEN


class LossLog:
    """The losses of all workers, each until its verdict.

    Args:
        on_news: called when something is known that was not.
        on_verdict: called with each verdict.
        lease: seconds after which a process that has not come back is gone.
        clock: seconds that only grow.
        call_later: calls a function in so many seconds; the event loop's, unless told otherwise.
    """

    def __init__(
        self,
        on_news: Callable[[], None],
        on_verdict: Callable[[Verdict], None],
        lease: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._on_news = on_news
        self._on_verdict = on_verdict
        self._lease = lease
        self._clock = clock
        self._call_later = call_later or _on_running_loop
        self._outage: Outage | None = None
        self._open: list[WorkerLoss] = []

    def note(self, worker: str, epoch: int, kind: Loss) -> WorkerLoss:
        """A worker is lost, in whatever way but that it was shut down."""
        outage = self._outage
        if outage is None or outage.over:
            outage = self._outage = Outage()
            self._call_later(OUTAGE_S, partial(self._end, outage))
        outage.workers.add(worker)
        loss = WorkerLoss(worker, epoch, self._clock(), outage, gone=kind is Loss.CRASHED)
        if kind is Loss.FAILED:
            loss.verdict = Verdict.FAILED
            self._on_verdict(loss.verdict)
        else:
            self._open.append(loss)
            self._call_later(self._lease, self._judge)
        self._on_news()
        return loss

    def returned(self, worker: str, epoch: int) -> None:
        """A worker is there: one that was lost, if address or process are the same."""
        for loss in self._open:
            if loss.epoch == epoch and not loss.gone:
                loss.verdict = Verdict.CUT
            elif loss.worker == worker:
                loss.gone = True
        self._judge()

    def _end(self, outage: Outage) -> None:
        outage.over = True
        self._judge()

    def _judge(self) -> None:
        """Gives the verdicts that can be given now."""
        expired = self._clock() - self._lease
        for loss in self._open:
            if loss.verdict is Verdict.OPEN and loss.outage.over and (loss.gone or loss.at <= expired):
                loss.verdict = Verdict.DIED
            if loss.verdict is not Verdict.OPEN:
                self._on_verdict(loss.verdict)
        self._open = [loss for loss in self._open if loss.verdict is Verdict.OPEN]
        self._on_news()


def _on_running_loop(seconds: float, function: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds + 0.001, function)  # clocks differ in their last digits

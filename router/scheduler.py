"""Binds waiting choices to workers, as late as possible: only when a worker has a slot for one."""

import asyncio
import logging
from collections.abc import Callable

from router.admission import WaitingQueue
from router.errors import QueueFull, Unavailable
from router.fleet import Fleet
from router.policy import Policy
from router.request import Choice, Request
from router.worker_link import WorkerLink

logger = logging.getLogger(__name__)


class Scheduler:
    """The way of requests from the queue to workers. Implements LinkListener.

    Args:
        fleet: the workers; the caller starts and stops it.
        queue: where requests wait.
        policy: chooses among workers with room.
        max_queue_wait: seconds after which a request is refused if all the while no worker took a choice of it.
        on_readiness: called when a worker became ready, or is not any more.
    """

    def __init__(
        self,
        fleet: Fleet,
        queue: WaitingQueue,
        policy: Policy,
        max_queue_wait: float,
        on_readiness: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self.policy = policy
        self._max_queue_wait = max_queue_wait
        self._on_readiness = on_readiness
        self._patience: dict[Request, asyncio.TimerHandle] = {}

    def start(self, request: Request) -> None:
        """Takes a request whose prompt is known. Whoever calls this must call ``end`` when the call is over."""
        self._queue.add(request)
        self._begin_patience(request)
        self.capacity_changed()

    def end(self, request: Request) -> None:
        """The call is over, for whatever reason: nothing of it waits or runs any more."""
        self._queue.discard(request)
        self._end_patience(request)
        for choice in request.choices:
            if choice.link is not None:
                choice.link.cancel(choice)
        # Cancelling frees nothing yet, but others may have waited behind this one.
        self.capacity_changed()

    def choose(self, request: Request | None = None) -> WorkerLink | None:
        """The worker that the next sequence would go to now; None when none has room."""
        links = [link for link in self._fleet.links if link.has_room]
        return self.policy.choose(links, request) if links else None

    # ---- LinkListener ----

    def readiness_changed(self) -> None:
        """Passes it on."""
        self._on_readiness()

    def capacity_changed(self) -> None:
        """Binds what can be bound."""
        now = asyncio.get_running_loop().time()
        while (choice := self._queue.first()) is not None:
            link = self.choose(choice.request)
            if link is None:
                return
            self._queue.pop_first()
            self._end_patience(choice.request)
            if choice.request in self._queue:
                self._begin_patience(choice.request)
            link.submit(choice, now)

    def put_back(self, choice: Choice) -> None:
        """The choice waits again, before all others of its priority."""
        if not choice.request.ended:
            self._queue.put_back(choice)
            self._begin_patience(choice.request)

    # ---- patience ----

    def _begin_patience(self, request: Request) -> None:
        self._end_patience(request)
        loop = asyncio.get_running_loop()
        self._patience[request] = loop.call_later(self._max_queue_wait, self._lose_patience, request)

    def _end_patience(self, request: Request) -> None:
        timer = self._patience.pop(request, None)
        if timer is not None:
            timer.cancel()

    def _lose_patience(self, request: Request) -> None:
        del self._patience[request]
        if any(choice.attempts.lost for choice in request.choices):
            request.fail(
                Unavailable(
                    f"the worker running this request was lost and no other was free for {self._max_queue_wait:g} s; "
                    "try again shortly"
                )
            )
        elif self._fleet.ready_count:
            request.fail(QueueFull(f"no worker was free for {self._max_queue_wait:g} s; try again later"))
        else:
            request.fail(Unavailable("no worker is ready to run the model; try again shortly"))

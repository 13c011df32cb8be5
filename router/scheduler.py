"""Takes requests, has them wait in the queue, and hands them to workers when the dispatcher has decided."""

import asyncio
import time
from collections.abc import Callable

from protos import inference_pb2, worker_pb2
from router.admission import WaitingQueue
from router.errors import DeadlineExceeded, QueueFull, Unavailable
from router.events import RouterEvents
from router.explanation import explain
from router.fleet import Fleet
from router.fleet_view import FleetView
from router.request import Choice, Request
from router.route import Route
from router.routing.dispatcher import Dispatcher
from router.worker_link import WorkerLink

# Between two looks at what running sequences have generated, to charge their tenants for it.
CHARGE_INTERVAL_S = 0.1


class Scheduler:
    """The way of requests from the queue to workers. Implements LinkListener.

    Args:
        fleet: the workers; the caller starts and stops it.
        view: what is known of them.
        queue: where requests wait.
        dispatcher: decides which request goes where, and when.
        max_queue_wait: seconds after which a request is refused if all the while no worker took a choice of it, or
            what took it had no place for it.
        events: are counted.
        on_readiness: called when a worker became ready, or is not any more.
    """

    def __init__(
        self,
        fleet: Fleet,
        view: FleetView,
        queue: WaitingQueue,
        dispatcher: Dispatcher,
        max_queue_wait: float,
        events: RouterEvents,
        on_readiness: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._view = view
        self._queue = queue
        self._dispatcher = dispatcher
        self._max_queue_wait = max_queue_wait
        self._events = events
        self._on_readiness = on_readiness
        self._patience: dict[Request, asyncio.TimerHandle] = {}
        self._charged_at = 0.0

    def start(self, request: Request) -> None:
        """Takes a request whose prompt is known. Whoever calls this must call ``end`` when the call is over.

        Raises:
            QueueFull: there is no room for its prompt.
            DeadlineExceeded: it cannot be met on any worker.
        """
        now = asyncio.get_running_loop().time()
        self._view.refresh()
        self._queue.add(request, self._view.block_size, now)
        for choice in request.choices:
            request.trace.waits(choice)
        self._begin_patience(request)
        self._dispatch(now)

    def end(self, request: Request) -> None:
        """The call is over, for whatever reason: nothing of it waits or runs any more."""
        self._queue.discard(request)
        self._end_patience(request)
        for choice in request.choices:
            if choice.link is not None:
                choice.link.cancel(choice)
        # Cancelling frees nothing yet, but others may have waited behind this one.
        self.capacity_changed()

    def resume(self, request: Request) -> None:
        """What was taken to be sent is sent: paused choices of which nothing is left wait for a worker again."""
        for choice in request.choices:
            if choice.paused and choice.caught_up:
                choice.paused = False
                if not request.ended and not choice.end_if_complete():
                    self.put_back(choice)
                    self.capacity_changed()

    def explain(self, prompt: bytes, cache_salt: bytes, session_id: bytes) -> inference_pb2.ExplainResponse:
        """What would become of a prompt (packed ids) that came now."""
        self._view.refresh()
        return explain(
            prompt,
            cache_salt,
            session_id,
            links=self._fleet.links,
            view=self._view,
            dispatcher=self._dispatcher,
            queued=len(self._queue),
            now=asyncio.get_running_loop().time(),
        )

    # ---- LinkListener ----

    def readiness_changed(self) -> None:
        """Passes it on."""
        self._on_readiness()

    def capacity_changed(self) -> None:
        """Binds what can be bound."""
        if len(self._queue):
            self._view.refresh()
            self._dispatch(asyncio.get_running_loop().time())

    def put_back(self, choice: Choice) -> None:
        """The choice waits again, for as long as its request did."""
        request = choice.request
        if not request.ended:
            self._queue.put_back(choice, self._view.block_size, asyncio.get_running_loop().time())
            request.trace.waits(choice)
            self._begin_patience(request)

    def joined(self, link: WorkerLink) -> None:
        """A worker is there."""
        self._view.join(link, asyncio.get_running_loop().time())

    def left(self, link: WorkerLink) -> None:
        """A worker is gone."""
        self._view.leave(link)

    def progressed(self, link: WorkerLink, batch: worker_pb2.StepBatch) -> None:
        """Steps of a worker ended."""
        self._view.progress(link, batch, asyncio.get_running_loop().time())

    def heard(self, link: WorkerLink, pong: worker_pb2.Pong) -> None:
        """A worker said how it is."""
        self._view.heard(link, pong, asyncio.get_running_loop().time())

    def told(self, link: WorkerLink, events: worker_pb2.KvEvents) -> None:
        """A worker's prefix cache has changed."""
        self._view.told(link, events, asyncio.get_running_loop().time())

    def rests(self, link: WorkerLink) -> None:
        """A worker is given a rest."""
        self._events.rests.inc()

    def refused(self, link: WorkerLink, slot: int, generation: int) -> None:
        """A worker did not take what it was given in a slot."""
        self._view.refused(link, slot, generation, asyncio.get_running_loop().time())

    def _dispatch(self, now: float) -> None:
        """Binds what can be bound; what is known of the workers is fresh."""
        if now - self._charged_at >= CHARGE_INTERVAL_S:
            self._charged_at = now
            self._view.charge_output()
        began = time.monotonic()
        done = self._dispatcher.dispatch(now)
        for entry, view, placed in done.placed:
            choice = self._queue.take(entry)
            request = choice.request
            if request in self._queue:
                self._begin_patience(request)
            link = self._view.link(view)
            if choice.running:  # it was begun before, somewhere
                self._events.moves.inc()
            else:
                self._events.queue_time.observe(placed.placed_at - placed.queued_at)
            link.submit(choice, now)
            request.trace.bound(choice, placed, link.name, began)
            if request.route is None or not request.begun.is_set():
                request.route = Route(link.name, placed)
            elif choice.index == 0:
                request.route.move(link.name)
            generation = link.slots.generation(choice.slot)
            self._view.took(link, choice.slot, generation, placed, request.params.tenant, len(choice.token_ids))
        for entry in done.hopeless:
            request = self._queue.request(entry)
            self._queue.discard(request)
            request.fail(DeadlineExceeded("no worker can begin to answer before the deadline passes"))

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
        waits = any(choice.link is not None and choice.link.has_waiting(choice) for choice in request.choices)
        if request not in self._queue and not waits:
            return
        if any(choice.attempts.lost or choice.token_ids for choice in request.choices):
            request.fail(
                Unavailable(
                    f"the worker running this request was lost and no other was free for {self._max_queue_wait:g} s; "
                    "try again shortly"
                )
            )
        elif self._fleet.ready_count:
            message = f"no worker was free for {self._max_queue_wait:g} s; try again later"
            request.fail(QueueFull(message, self._queue.retry_after()))
        else:
            request.fail(Unavailable("no worker is ready to run the model; try again shortly"))

"""Who may wait for a worker: the bounds on the queue, and who goes when they are reached.

The order of those who wait is router/routing's. A request's choices stand there together, as one entry.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from protos.prefix import block_hashes
from router.errors import QueueFull
from router.request import Choice, Request, pack_ids
from router.routing.dispatcher import Dispatcher
from router.routing.fair_queue import FairQueue
from router.routing.waiting import Waiting
from router.routing.worker_view import WorkerView

# Seconds that a client is told to wait, at least and at most.
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


@dataclass(slots=True, eq=False)
class QueuedRequest(Waiting):
    """A request in the queue.

    Attributes:
        request: the request.
        choices: those that no worker has.
        output_tokens: what was to be expected of each one's output when the request came.
    """

    request: Request = field(kw_only=True)
    choices: deque[Choice] = field(kw_only=True)
    output_tokens: float = field(kw_only=True)


class WaitingQueue:
    """Requests with choices that no worker has yet.

    Args:
        order: their order.
        dispatcher: takes them from there.
        max_requests: most requests at once, those whose prompt is being tokenized included.
        max_tokens: most prompt tokens that all of them together lack, as far as is known.
    """

    def __init__(self, order: FairQueue, dispatcher: Dispatcher, max_requests: int, max_tokens: int) -> None:
        self._order = order
        self._dispatcher = dispatcher
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._entering = 0
        self._entries: dict[Request, QueuedRequest] = {}
        # To be expected of all choices.
        self._output_tokens = 0.0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        """Whether a choice of the request waits."""
        return request in self._entries

    @contextmanager
    def place(self, priority: int | None = None) -> Iterator[None]:
        """Holds a place while a prompt is being tokenized.

        Args:
            priority: of a request that would take the place of one of a lower class; None: it would not.

        Raises:
            QueueFull: there is none.
        """
        if len(self._entries) + self._entering >= self._max_requests and self._victim(priority) is None:
            raise QueueFull(f"{self._max_requests} requests are waiting already; try again shortly", self.retry_after())
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1

    def add(self, request: Request, block_size: int, now: float) -> None:
        """Puts a request in its place, right after it left its ``place``. ``now``: the loop's time.

        Where there is no room, requests of lower classes give way, the newest first.

        Raises:
            QueueFull: there is no room, and none can be made.
        """
        entry = self._entry(request, block_size, now)
        while self._has_no_room_for(entry):
            victim = self._victim(entry.priority)
            if victim is None:
                raise QueueFull(
                    f"the requests that wait already have {self._order.missing} prompt tokens to compute, of at most "
                    f"{self._max_tokens}; try again shortly",
                    self.retry_after(),
                )
            self._drop(victim)
            victim.request.fail(QueueFull("more urgent requests took its place; try again shortly", self.retry_after()))
        self._insert(entry)

    def put_back(self, choice: Choice, block_size: int, now: float) -> None:
        """A worker did not take a choice after all, or was lost with it. It waits for as long as its request did.

        Its output so far will be computed again, and counts as prompt.
        """
        entry = self._entries.get(choice.request)
        if entry is None:
            entry = self._entry(choice.request, block_size, choice.request.arrival or now)
            entry.choices.clear()
            entry.places = 0
        else:
            self._order.discard(entry)
            self._output_tokens -= entry.output_tokens * len(entry.choices)
        entry.choices.appendleft(choice)
        entry.places += 1
        tokens = choice.request.prompt_tokens + len(choice.token_ids)
        if tokens > entry.prompt_tokens:
            entry.prompt_tokens = tokens
            entry.names = _names(choice.request, block_size, choice.token_ids)
        self._insert(entry)

    def take(self, entry: Waiting) -> Choice:
        """The next choice of an entry for which a worker was found."""
        assert isinstance(entry, QueuedRequest)
        choice = entry.choices.popleft()
        self._output_tokens -= entry.output_tokens
        if not entry.choices:
            del self._entries[entry.request]
        return choice

    def request(self, entry: Waiting) -> Request:
        """The request of an entry."""
        assert isinstance(entry, QueuedRequest)
        return entry.request

    def discard(self, request: Request) -> None:
        """The request waits no more, if it did."""
        entry = self._entries.get(request)
        if entry is not None:
            self._drop(entry)

    def retry_after(self) -> float:
        """Seconds until what waits now should have found a worker: what there is to compute, at the workers' rate, or
        until enough of what decodes has ended, whichever is longer.
        """
        views: Sequence[WorkerView] = [view for view in self._dispatcher.views if view.accepting]
        rate = sum(view.prefill_rate for view in views)
        if not rate:
            return MIN_RETRY_S
        prefill_s = (self._order.missing + sum(view.backlog for view in views)) / rate
        place_s = self._dispatcher.output_lengths.next_place_s(views, self._output_tokens)
        return min(max(MIN_RETRY_S, prefill_s, place_s), MAX_RETRY_S)

    def _entry(self, request: Request, block_size: int, now: float) -> QueuedRequest:
        params = request.params
        names = _names(request, block_size)
        if request.arrival is None:
            request.arrival = now
        return QueuedRequest(
            names,
            request.prompt_tokens,
            now,
            block_size,
            priority=params.priority,
            tenant=params.tenant,
            affinity=params.session_id.encode() or (names[0] if names else request.prompt),
            deadline=request.deadline,
            places=len(request.choices),
            request=request,
            choices=deque(request.choices),
            output_tokens=self._dispatcher.output_lengths.expected(request.max_tokens),
        )

    def _insert(self, entry: QueuedRequest) -> None:
        self._entries[entry.request] = entry
        self._output_tokens += entry.output_tokens * len(entry.choices)
        self._dispatcher.add(entry)

    def _drop(self, entry: QueuedRequest) -> None:
        del self._entries[entry.request]
        self._output_tokens -= entry.output_tokens * len(entry.choices)
        self._order.discard(entry)

    def _has_no_room_for(self, entry: QueuedRequest) -> bool:
        if not self._entries:
            return False
        if len(self._entries) >= self._max_requests:
            return True
        return self._order.missing + self._dispatcher.missing(entry) > self._max_tokens

    def _victim(self, priority: int | None) -> QueuedRequest | None:
        """Who must go for a request of this class; None: nobody is of a lower one."""
        last = self._order.last_of_lowest_class() if priority is not None else None
        if last is None or priority is None or last.priority <= priority:
            return None
        assert isinstance(last, QueuedRequest)
        return last


def _names(request: Request, block_size: int, output: Sequence[int] = ()) -> list[bytes]:
    """The names of a prompt's full blocks, and of the output's that follows it."""
    if request.params.skip_reading_prefix_cache:
        return []  # a prompt that must be computed whole is at home nowhere
    return block_hashes(request.prompt + pack_ids(list(output)), block_size, request.params.cache_salt)

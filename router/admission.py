"""The queue: requests that wait for a worker, oldest first, and the bound on how many there may be."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import QueueFull
from router.request import Choice, Request


class WaitingQueue:
    """Requests with choices that no worker has yet. A request's choices stay together.

    Args:
        limit: most requests at once, those whose prompt is being tokenized included.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entering = 0
        self._waiting: OrderedDict[Request, deque[Choice]] = OrderedDict()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        """Whether a choice of the request waits."""
        return request in self._waiting

    @contextmanager
    def place(self) -> Iterator[None]:
        """Holds a place while a prompt is being tokenized. Raises QueueFull when there is none."""
        if len(self._waiting) + self._entering >= self._limit:
            raise QueueFull(f"{self._limit} requests are waiting already; try again shortly")
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1

    def add(self, request: Request) -> None:
        """Puts a request at the end, right after it left its ``place``: that place becomes this one."""
        self._waiting[request] = deque(request.choices)

    def first(self) -> Choice | None:
        """The choice whose turn it is."""
        return next(iter(self._waiting.values()))[0] if self._waiting else None

    def pop_first(self) -> None:
        """Removes the choice whose turn it is: a worker has it."""
        request, choices = next(iter(self._waiting.items()))
        choices.popleft()
        if not choices:
            del self._waiting[request]

    def put_back(self, choice: Choice) -> None:
        """A worker did not take a choice after all: it is the next again. It keeps its place, so no bound applies."""
        self._waiting.setdefault(choice.request, deque()).appendleft(choice)
        self._waiting.move_to_end(choice.request, last=False)

    def discard(self, request: Request) -> None:
        """The request waits no more, if it did."""
        self._waiting.pop(request, None)

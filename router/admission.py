"""The queue: requests that wait for a worker, by priority, then oldest first; and the bound on their number."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import QueueFull
from router.request import Choice, Request


class WaitingQueue:
    """Requests with choices that no worker has yet, in the order of their turns. A request's choices stay together.

    Args:
        limit: most requests at once, those whose prompt is being tokenized included.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entering = 0
        # By priority; no class is empty.
        self._classes: dict[int, OrderedDict[Request, deque[Choice]]] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._classes.values()))

    def __contains__(self, request: Request) -> bool:
        """Whether a choice of the request waits."""
        return request in self._classes.get(request.params.priority, ())

    @contextmanager
    def place(self) -> Iterator[None]:
        """Holds a place while a prompt is being tokenized. Raises QueueFull when there is none."""
        if len(self) + self._entering >= self._limit:
            raise QueueFull(f"{self._limit} requests are waiting already; try again shortly")
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1

    def add(self, request: Request) -> None:
        """Puts a request at the end of its class, right after it left its ``place``: that place becomes this one."""
        self._class_of(request)[request] = deque(request.choices)

    def first(self) -> Choice | None:
        """The choice whose turn it is."""
        if not self._classes:
            return None
        return next(iter(self._classes[min(self._classes)].values()))[0]

    def pop_first(self) -> None:
        """Removes the choice whose turn it is: a worker has it."""
        request, choices = next(iter(self._classes[min(self._classes)].items()))
        choices.popleft()
        if not choices:
            self.discard(request)

    def put_back(self, choice: Choice) -> None:
        """A worker did not take a choice after all: it is the next of its class again. It keeps its place."""
        waiting = self._class_of(choice.request)
        waiting.setdefault(choice.request, deque()).appendleft(choice)
        waiting.move_to_end(choice.request, last=False)

    def discard(self, request: Request) -> None:
        """The request waits no more, if it did."""
        waiting = self._class_of(request)
        waiting.pop(request, None)
        if not waiting:
            del self._classes[request.params.priority]

    def _class_of(self, request: Request) -> OrderedDict[Request, deque[Choice]]:
        return self._classes.setdefault(request.params.priority, OrderedDict())

"""Which of several workers with room gets a sequence."""

from collections.abc import Sequence
from typing import Protocol

from router.request import Request
from router.worker_link import WorkerLink


class Policy(Protocol):
    """A rule to choose by. ``score`` is what it minimises, for Explain."""

    name: str

    def score(self, link: WorkerLink) -> float:
        """How much speaks against a worker."""

    def choose(self, links: Sequence[WorkerLink], request: Request | None) -> WorkerLink:
        """One of ``links``, at least one, which all have room. ``request`` is None for a question without effect."""


class LeastLoad:
    """The worker whose sequences have the fewest tokens, prompt and output; of equals the one with fewer sequences.

    A worker that runs another choice of the request comes first: the prompt is computed there already.
    """

    name = "least_load"

    def score(self, link: WorkerLink) -> float:
        """Tokens on the worker."""
        return float(link.slots.tokens)

    def choose(self, links: Sequence[WorkerLink], request: Request | None) -> WorkerLink:
        """The least loaded."""
        siblings = {choice.link for choice in request.choices} if request is not None else set()
        return min(links, key=lambda link: (link not in siblings, link.slots.tokens, link.slots.running))


class RoundRobin:
    """Each worker in turn."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turns: dict[WorkerLink, int] = {}

    def score(self, link: WorkerLink) -> float:
        """When the worker had its last turn."""
        return float(self._turns.get(link, 0))

    def choose(self, links: Sequence[WorkerLink], request: Request | None) -> WorkerLink:
        """The one whose last turn is the longest ago."""
        chosen = min(links, key=self.score)
        if request is not None:
            self._turns[chosen] = max(self._turns.values(), default=0) + 1
        return chosen


POLICIES: dict[str, type[LeastLoad] | type[RoundRobin]] = {"least_load": LeastLoad, "round_robin": RoundRobin}

"""Which worker a request should go to: the rules that --policy names."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from router.routing.score import TIE, Score, score
from router.routing.waiting import Waiting
from router.routing.worker_view import WorkerView

# Seconds. Scores that are closer are equal even where both are next to nothing.
_LEAST_TIE_S = 1e-4


@dataclass(frozen=True, slots=True)
class Question:
    """What a policy is asked.

    Attributes:
        waiting: the request.
        depths: blocks of its prompt that workers have, by their numbers.
        reserved: prompt tokens that requests before this one, which wait as well, will bring to workers.
        now: seconds.
    """

    waiting: Waiting
    depths: Mapping[int, int]
    reserved: Mapping[int, int]
    now: float

    def cached(self, view: WorkerView) -> int:
        """Tokens of the prompt that a worker is believed to have."""
        return self.waiting.cached(self.depths.get(view.number, 0))

    def score(self, view: WorkerView) -> Score:
        """What speaks against a worker, in seconds."""
        return score(view, self.waiting.prompt_tokens, self.cached(view), self.reserved.get(view.number, 0))


class Policy(Protocol):
    """A rule.

    Attributes:
        name: what --policy calls it.
        waits: whether a request stays in the queue while the worker of its choice has no room; else the choice is among
            workers with room.
    """

    name: str
    waits: bool

    def rank(self, question: Question, view: WorkerView) -> float:
        """What the policy minimises, for Explain."""

    def choose(self, question: Question, views: Sequence[WorkerView]) -> WorkerView:
        """One of ``views``, of which there is at least one."""

    def chosen(self, view: WorkerView) -> None:
        """A sequence went to the worker."""


class Prefix:
    """The worker with the least score (see score.py): close to free, and with much of the prompt cached.

    Of equals the one where fewer sequences decode, then the one that must evict the least useful blocks, then the same
    for prompts that begin alike.
    """

    name = "prefix"
    waits = True

    def rank(self, question: Question, view: WorkerView) -> float:
        """Seconds."""
        return question.score(view).total

    def choose(self, question: Question, views: Sequence[WorkerView]) -> WorkerView:
        """The least score."""
        if len(views) == 1:
            return views[0]
        totals = [question.score(view).total for view in views]
        limit = min(totals) * (1 + TIE) + _LEAST_TIE_S
        equals = [view for view, total in zip(views, totals, strict=True) if total <= limit]
        if len(equals) == 1:
            return equals[0]
        now, affinity = question.now, question.waiting.affinity
        return min(equals, key=lambda view: (view.decoding, -view.cache.coldness(now), _draw(affinity, view)))

    def chosen(self, view: WorkerView) -> None:
        """Nothing to note."""


class LeastLoad:
    """The worker whose sequences have the fewest prompt tokens to compute; of equals the one with fewer sequences."""

    name = "least_load"
    waits = False

    def rank(self, question: Question, view: WorkerView) -> float:
        """Sequences, and prompt tokens to compute in units of a step's budget."""
        return view.running + view.backlog / max(1, view.step_budget)

    def choose(self, question: Question, views: Sequence[WorkerView]) -> WorkerView:
        """The least loaded."""
        return min(views, key=lambda view: self.rank(question, view))

    def chosen(self, view: WorkerView) -> None:
        """Nothing to note."""


class RoundRobin:
    """Each worker in turn."""

    name = "round_robin"
    waits = False

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def rank(self, question: Question, view: WorkerView) -> float:
        """When the worker had its last turn."""
        return float(self._turns.get(view.address, 0))

    def choose(self, question: Question, views: Sequence[WorkerView]) -> WorkerView:
        """The one whose last turn is the longest ago."""
        return min(views, key=lambda view: self._turns.get(view.address, 0))

    def chosen(self, view: WorkerView) -> None:
        """Notes its turn."""
        self._turns[view.address] = max(self._turns.values(), default=0) + 1


class Random:
    """Any worker, all equally likely."""

    name = "random"
    waits = False

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def rank(self, question: Question, view: WorkerView) -> float:
        """Nothing speaks for one or another."""
        return 0.0

    def choose(self, question: Question, views: Sequence[WorkerView]) -> WorkerView:
        """Any."""
        return self._random.choice(views)

    def chosen(self, view: WorkerView) -> None:
        """Nothing to note."""


class PowerOfTwo(LeastLoad):
    """The less loaded of two workers drawn at random (Mitzenmacher, 2001)."""

    name = "power_of_two"

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, question: Question, views: Sequence[WorkerView]) -> WorkerView:
        """The less loaded of two."""
        return super().choose(question, self._random.sample(views, min(2, len(views))))


class Session:
    """One worker for each session: rendezvous hashing (Thaler and Ravishankar, 1998) moves few when workers change.

    A session is what the request's ``session_id`` says, else prompts whose first block is the same.
    """

    name = "session"
    waits = True

    def rank(self, question: Question, view: WorkerView) -> float:
        """Where the worker stands in the session's draw, 0 to 1."""
        return _draw(question.waiting.affinity, view) / 2**64

    def choose(self, question: Question, views: Sequence[WorkerView]) -> WorkerView:
        """The session's worker."""
        return min(views, key=lambda view: _draw(question.waiting.affinity, view))

    def chosen(self, view: WorkerView) -> None:
        """Nothing to note."""


def _draw(affinity: bytes, view: WorkerView) -> int:
    """A number of 64 bits that is the same whenever the two meet."""
    return xxhash.xxh3_64_intdigest(affinity, xxhash.xxh3_64_intdigest(view.address.encode()))


POLICIES: dict[str, type[Prefix | LeastLoad | RoundRobin | Random | PowerOfTwo | Session]] = {
    rule.name: rule for rule in (Prefix, RoundRobin, Random, LeastLoad, PowerOfTwo, Session)
}

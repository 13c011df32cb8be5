"""Binds those who wait to workers that can start them soon: late, so that the choice rests on what is known last."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.routing.fair_queue import FairQueue
from router.routing.output_lengths import OutputLengths
from router.routing.policies import Policy, Question
from router.routing.prefix_index import PrefixIndex
from router.routing.score import first_token_s
from router.routing.waiting import Waiting
from router.routing.worker_view import Placed, WorkerView

# Requests that are looked at in one go: what comes after them cannot be served before them for long.
MAX_SCAN = 64
# Virtual tokens that a tenant may fall behind the others while its requests wait for the workers of their choice.
QUANTUM = 32_768


@dataclass(slots=True)
class Dispatch:
    """What was decided in one go.

    Attributes:
        placed: which request goes where; once for each of its sequences.
        hopeless: requests whose deadline passes before any worker could give them a first token.
    """

    placed: list[tuple[Waiting, WorkerView, Placed]] = field(default_factory=list)
    hopeless: list[Waiting] = field(default_factory=list)


class Dispatcher:
    """Decides.

    Args:
        index: what workers have cached.
        queue: who waits; the caller puts requests in, this takes them out.
        policy: which worker is right for a request.

    Attributes:
        views: all workers; the caller's to change.
        output_lengths: what is to be expected of outputs; the caller's to teach.
    """

    def __init__(self, index: PrefixIndex, queue: FairQueue, policy: Policy) -> None:
        self.views: list[WorkerView] = []
        self.output_lengths = OutputLengths()
        self._index = index
        self._queue = queue
        self.policy = policy

    def add(self, entry: Waiting) -> None:
        """A request waits from now on."""
        entry.missing = self.missing(entry)
        self._queue.add(entry)

    def missing(self, entry: Waiting) -> int:
        """Prompt tokens that the worker which has most of the prompt would have to compute."""
        return self._missing(entry, self._index.match(entry.names))

    def is_hopeless(self, entry: Waiting, now: float) -> bool:
        """Whether a request's deadline passes before any worker could give it a first token."""
        return self._is_hopeless(self.question(entry, now), [view for view in self.views if view.accepting])

    def dispatch(self, now: float) -> Dispatch:
        """Gives workers with room what they should have. ``now``: seconds."""
        done = Dispatch()
        while self._pass_over(done, now):
            pass
        return done

    def _pass_over(self, done: Dispatch, now: float) -> bool:
        """Goes once through those who wait. Returns whether to do so again, since a tenant got too far ahead."""
        roomy = {view.number for view in self.views if view.has_room}
        if not roomy:
            return False
        placed_before, unfair = len(done.placed), False
        candidates = self._with_slots()
        reserved: dict[int, int] = {}
        seen: list[tuple[Waiting, int]] = []
        for entry in self._queue.in_order():
            if not roomy or len(seen) == MAX_SCAN:
                break
            if self._queue.lead(entry) > QUANTUM:
                unfair = True
                break
            if self._queue.lead_in_account(entry) > QUANTUM:
                unfair = True
                continue
            depths = self._index.match(entry.names)
            seen.append((entry, self._missing(entry, depths)))
            question = Question(entry, depths, reserved, now)
            if self._is_hopeless(question, candidates):
                done.hopeless.append(entry)
                continue
            while entry.places and roomy:
                view = self._choose(question, candidates, roomy)
                missing = entry.prompt_tokens - question.cached(view)
                if view.number not in roomy:
                    reserved[view.number] = reserved.get(view.number, 0) + entry.places * missing
                    break
                if not view.fits(-(-missing // entry.block_size)):
                    # Whoever comes later must not take the memory bit by bit.
                    roomy.discard(view.number)
                    break
                done.placed.append((entry, view, self._place(question, view)))
                if not view.has_room:
                    roomy.discard(view.number)
                    candidates = self._with_slots()
                if entry.places:
                    question = Question(entry, self._index.match(entry.names), reserved, now)
        for entry, missing in seen:
            if not entry.places or entry in done.hopeless:
                self._queue.discard(entry)
            else:
                self._queue.update(entry, missing)
        return unfair and len(done.placed) > placed_before

    def _with_slots(self) -> list[WorkerView]:
        """Workers to wait for: what there is to compute ends soon, but what holds a slot may run for minutes."""
        return [view for view in self.views if view.accepting and view.has_slot]

    def choose_now(self, entry: Waiting, now: float) -> WorkerView | None:
        """The worker that a request would get if it came now, before all others; None: it would wait."""
        candidates = self._with_slots()
        roomy = {view.number for view in candidates if view.has_room}
        if not roomy:
            return None
        if not self.policy.waits:
            candidates = [view for view in candidates if view.number in roomy]
        view = self.policy.choose(self.question(entry, now), candidates)
        return view if view.number in roomy else None

    def question(self, entry: Waiting, now: float) -> Question:
        """What would be asked about a request that comes now, before all others."""
        return Question(entry, self._index.match(entry.names), {}, now)

    @staticmethod
    def _missing(entry: Waiting, depths: Mapping[int, int]) -> int:
        return entry.prompt_tokens - entry.cached(max(depths.values(), default=0))

    def _choose(self, question: Question, candidates: Sequence[WorkerView], roomy: set[int]) -> WorkerView:
        """The worker for a request; one without room: it is worth waiting for."""
        if not self.policy.waits or self._queue.lag(question.waiting) > QUANTUM:
            candidates = [view for view in candidates if view.number in roomy]
        return self.policy.choose(question, candidates)

    def _place(self, question: Question, view: WorkerView) -> Placed:
        entry, cached = question.waiting, question.cached(view)
        missing = entry.prompt_tokens - cached
        placed = Placed(
            entry.names, entry.prompt_tokens, cached, missing, self._reason(question, view), entry.arrival, question.now
        )
        entry.places -= 1
        view.place(placed)
        self.policy.chosen(view)
        self._queue.counters.charge(entry.tenant, missing=missing, cached=cached)
        return placed

    def _reason(self, question: Question, view: WorkerView) -> str:
        """Why this worker, in a word."""
        if not self.policy.waits:
            return self.policy.name
        if len(self.views) == 1:
            return "only"
        depth = question.depths.get(view.number, 0)
        if self.policy.name == "prefix":
            deepest = max(question.depths.values(), default=0)
            if not deepest:
                return "load"
            return "prefix" if depth == deepest else "balance"
        return self.policy.name

    def _is_hopeless(self, question: Question, candidates: Sequence[WorkerView]) -> bool:
        """Whether the deadline passes even on the best worker; never where a worker's speed is not known."""
        deadline = question.waiting.deadline
        if deadline is None or not candidates or not all(view.throughput.measured for view in candidates):
            return False
        tokens = question.waiting.prompt_tokens
        return question.now + min(first_token_s(view, tokens, question.cached(view)) for view in candidates) > deadline

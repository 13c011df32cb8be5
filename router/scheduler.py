"""Which choice goes to which worker, and when: choices wait here, and are bound once a worker can start them soon."""

from collections import OrderedDict

from router.fleet import Fleet
from router.request import Choice
from router.worker_link import WorkerLink


class Scheduler:
    """A first-come queue in front of the fleet.

    Args:
        fleet: the workers.
        policy: ``least_load`` (fewest tokens held, then fewest sequences) or ``round_robin``.
    """

    def __init__(self, fleet: Fleet, policy: str) -> None:
        self._fleet = fleet
        self.policy = policy
        self._waiting: OrderedDict[Choice, None] = OrderedDict()
        self._bound: dict[Choice, WorkerLink] = {}
        self._turn = 0

    @property
    def num_waiting(self) -> int:
        """Choices that no worker has yet."""
        return len(self._waiting)

    def add(self, choices: list[Choice]) -> None:
        """Queues choices and binds what can be bound."""
        for choice in choices:
            self._waiting[choice] = None
        self.bind()

    def requeue(self, choice: Choice) -> None:
        """Puts a choice that a worker did not begin back to the front."""
        self._bound.pop(choice, None)
        if not choice.request.finished:
            self._waiting[choice] = None
            self._waiting.move_to_end(choice, last=False)

    def is_waiting(self, choice: Choice) -> bool:
        """Whether no worker has the choice yet."""
        return choice in self._waiting

    def remove(self, choice: Choice) -> None:
        """Forgets a choice: it leaves the queue, or is cancelled on its worker."""
        self._waiting.pop(choice, None)
        link = self._bound.pop(choice, None)
        if link is not None:
            link.cancel(choice)

    def bind(self) -> None:
        """Gives waiting choices to workers for as long as one has room."""
        while self._waiting:
            choice = next(iter(self._waiting))
            link = self.choose(choice)
            if link is None:
                return
            del self._waiting[choice]
            self._bound[choice] = link
            link.submit(choice)

    def choose(self, choice: Choice | None = None) -> WorkerLink | None:
        """The worker that the next choice would go to, or None while all are full.

        Choices of one request stay together where possible, so that their prompt is computed once.
        """
        if choice is not None:
            for sibling in choice.request.choices:
                link = self._bound.get(sibling)
                if link is not None and link.has_room:
                    return link
        links = self._fleet.links
        free = [link for link in links if link.has_room]
        if not free:
            return None
        if self.policy == "round_robin":
            for step in range(len(links)):
                link = links[(self._turn + step) % len(links)]
                if link in free:
                    if choice is not None:
                        self._turn = (self._turn + step + 1) % len(links)
                    return link
        return min(free, key=self.score)

    @staticmethod
    def score(link: WorkerLink) -> tuple[int, int]:
        """What ``least_load`` minimises."""
        return link.held_tokens, link.running

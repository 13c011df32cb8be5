"""The order of those who wait: by class, then the account that was served least, then its user who was, then the least
work with ageing.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Set

from router.routing.tenant_counters import TenantCounters, account_of
from router.routing.virtual_counters import cost
from router.routing.waiting import Waiting

# A second of waiting makes up for so many missing tokens.
AGEING_TOKENS_S = 2000.0


class FairQueue:
    """All that wait.

    A user's requests of one class are kept in the order of ``missing - AGEING_TOKENS_S * time waited``; as all age
    alike, that order only changes where ``missing`` does.

    Args:
        counters: what tenants were served.

    Attributes:
        missing: prompt tokens to be computed for all that wait.
    """

    def __init__(self, counters: TenantCounters) -> None:
        self.counters = counters
        self.missing = 0
        # By class, then account, then tenant; none is empty.
        self._classes: dict[int, dict[str, dict[str, list[Waiting]]]] = {}
        # By account, then tenant; none is empty.
        self._counts: dict[str, dict[str, int]] = {}
        self._size = 0

    def __len__(self) -> int:
        """Requests."""
        return self._size

    def __contains__(self, entry: Waiting) -> bool:
        """Whether a request waits."""
        return entry in self._users(entry).get(entry.tenant, ())

    @property
    def accounts(self) -> Set[str]:
        """Those that have requests waiting."""
        return self._counts.keys()

    def add(self, entry: Waiting) -> None:
        """A request waits from now on."""
        account = account_of(entry.tenant)
        counts = self._counts.get(account, {})
        if entry.tenant not in counts:
            self.counters.join(entry.tenant, self._counts, counts)
        counts[entry.tenant] = counts.get(entry.tenant, 0) + 1
        self._counts[account] = counts
        self._size += 1
        self.missing += entry.missing
        self._insert(entry)

    def discard(self, entry: Waiting) -> None:
        """A request waits no more, if it did."""
        if not self._take_out(entry):
            return
        self.missing -= entry.missing
        self._size -= 1
        account = account_of(entry.tenant)
        counts = self._counts[account]
        counts[entry.tenant] -= 1
        if not counts[entry.tenant]:
            del counts[entry.tenant]
            if not counts:
                del self._counts[account]
            self.counters.leave(entry.tenant, last=not counts)

    def update(self, entry: Waiting, missing: int) -> None:
        """What a waiting request lacks has changed."""
        if missing != entry.missing and self._take_out(entry):
            self.missing += missing - entry.missing
            entry.missing = missing
            self._insert(entry)

    def in_order(self) -> Iterator[Waiting]:
        """All that wait, as their turns would come if each were served in turn. The queue must not change meanwhile."""
        if self._size == 1:  # nobody to be compared with
            yield from self._of_class(next(iter(self._classes)))
            return
        of_account, of_user = self.counters.of_account, self.counters.of_user
        for priority in sorted(self._classes):
            accounts = self._classes[priority]
            yield from _in_turns(
                (
                    of_account(account),
                    account,
                    _in_turns((of_user(tenant), tenant, iter(entries)) for tenant, entries in users.items()),
                )
                for account, users in accounts.items()
            )

    def last_of_lowest_class(self) -> Waiting | None:
        """Who goes first when there is no room for all: the newest of the class that is served last."""
        if not self._classes:
            return None
        return max(self._of_class(max(self._classes)), key=lambda entry: entry.arrival)

    def missing_before(self, priority: int) -> int:
        """Prompt tokens to be computed for those of this class and the classes before it."""
        if all(class_ <= priority for class_ in self._classes):
            return self.missing
        classes = [class_ for class_ in self._classes if class_ <= priority]
        return sum(entry.missing for class_ in classes for entry in self._of_class(class_))

    def lag(self, entry: Waiting) -> float:
        """Virtual tokens by which its account is behind the one that was served most, of those in its class that wait,
        or its user behind another of the account, if that is more.
        """
        if self._size == 1:
            return 0.0
        accounts, users = self._classes[entry.priority], self._users(entry)
        return max(
            -_ahead(account_of(entry.tenant), accounts, self.counters.of_account, max),
            -_ahead(entry.tenant, users, self.counters.of_user, max),
        )

    def lead(self, entry: Waiting) -> float:
        """Virtual tokens by which its account is ahead of the one that was served least of those in its class."""
        if self._size == 1:
            return 0.0
        return _ahead(account_of(entry.tenant), self._classes[entry.priority], self.counters.of_account, min)

    def lead_in_account(self, entry: Waiting) -> float:
        """Virtual tokens by which its user is ahead of the one of the account who was served least."""
        if self._size == 1:
            return 0.0
        return _ahead(entry.tenant, self._users(entry), self.counters.of_user, min)

    def _of_class(self, priority: int) -> Iterator[Waiting]:
        for users in self._classes[priority].values():
            for entries in users.values():
                yield from entries

    def _users(self, entry: Waiting) -> dict[str, list[Waiting]]:
        """What waits of the entry's account in its class."""
        return self._classes.get(entry.priority, {}).get(account_of(entry.tenant), {})

    def _insert(self, entry: Waiting) -> None:
        users = self._classes.setdefault(entry.priority, {}).setdefault(account_of(entry.tenant), {})
        insort(users.setdefault(entry.tenant, []), entry, key=_turn)

    def _take_out(self, entry: Waiting) -> bool:
        users = self._users(entry)
        entries = users.get(entry.tenant, [])
        place = bisect_left(entries, _turn(entry), key=_turn)
        while place < len(entries) and entries[place] is not entry:
            place += 1
        if place == len(entries):
            return False
        del entries[place]
        if not entries:
            del users[entry.tenant]
            if not users:
                accounts = self._classes[entry.priority]
                del accounts[account_of(entry.tenant)]
                if not accounts:
                    del self._classes[entry.priority]
        return True


def _turn(entry: Waiting) -> float:
    return entry.missing + AGEING_TOKENS_S * entry.arrival


def _in_turns(parties: Iterable[tuple[float, str, Iterator[Waiting]]]) -> Iterator[Waiting]:
    """The requests of some parties (served so far, name, requests in order) as if each were served when it is named."""
    turns = list(parties)
    heapq.heapify(turns)
    while turns:
        served, name, entries = turns[0]
        entry = next(entries, None)
        if entry is None:
            heapq.heappop(turns)
            continue
        yield entry
        served += cost(missing=entry.missing, cached=entry.prompt_tokens - entry.missing)
        heapq.heapreplace(turns, (served, name, entries))


def _ahead(
    name: str, others: Iterable[str], served: Callable[[str], float], end: Callable[[Iterable[float]], float]
) -> float:
    """By how much a party is ahead of the one that was served most (``end`` is max) or least (min)."""
    return served(name) - end(map(served, others))

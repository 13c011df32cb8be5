"""The order of those who wait: by class, then the tenant that was served least, then the least work with ageing."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Set

from router.routing.virtual_counters import VirtualCounters, cost
from router.routing.waiting import Waiting

# A second of waiting makes up for so many missing tokens.
AGEING_TOKENS_S = 2000.0


class FairQueue:
    """All that wait.

    A tenant's requests of one class are kept in the order of ``missing - AGEING_TOKENS_S * time waited``; as all age
    alike, that order only changes where ``missing`` does.

    Args:
        counters: what tenants were served.

    Attributes:
        missing: prompt tokens to be computed for all that wait.
    """

    def __init__(self, counters: VirtualCounters) -> None:
        self.counters = counters
        self.missing = 0
        # By class, then tenant; none is empty.
        self._classes: dict[int, dict[str, list[Waiting]]] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        """Requests."""
        return sum(self._counts.values())

    def __contains__(self, entry: Waiting) -> bool:
        """Whether a request waits."""
        return entry in self._classes.get(entry.priority, {}).get(entry.tenant, ())

    @property
    def tenants(self) -> Set[str]:
        """Those that have requests waiting."""
        return self._counts.keys()

    def add(self, entry: Waiting) -> None:
        """A request waits from now on."""
        if entry.tenant not in self._counts:
            self.counters.join(entry.tenant, self._counts)
        self._counts[entry.tenant] = self._counts.get(entry.tenant, 0) + 1
        self.missing += entry.missing
        self._insert(entry)

    def discard(self, entry: Waiting) -> None:
        """A request waits no more, if it did."""
        if not self._take_out(entry):
            return
        self.missing -= entry.missing
        self._counts[entry.tenant] -= 1
        if not self._counts[entry.tenant]:
            del self._counts[entry.tenant]
            self.counters.leave(entry.tenant)

    def update(self, entry: Waiting, missing: int) -> None:
        """What a waiting request lacks has changed."""
        if missing != entry.missing and self._take_out(entry):
            self.missing += missing - entry.missing
            entry.missing = missing
            self._insert(entry)

    def in_order(self) -> Iterator[Waiting]:
        """All that wait, as their turns would come if each were served in turn. The queue must not change meanwhile."""
        for priority in sorted(self._classes):
            tenants = self._classes[priority]
            turns = [(self.counters.of(tenant), tenant, 0) for tenant in tenants]
            heapq.heapify(turns)
            while turns:
                served, tenant, place = turns[0]
                entry = tenants[tenant][place]
                yield entry
                if place + 1 < len(tenants[tenant]):
                    cached = entry.prompt_tokens - entry.missing
                    served += cost(missing=entry.missing, cached=cached)
                    heapq.heapreplace(turns, (served, tenant, place + 1))
                else:
                    heapq.heappop(turns)

    def last_of_lowest_class(self) -> Waiting | None:
        """Who goes first when there is no room for all: the newest of the class that is served last."""
        if not self._classes:
            return None
        tenants = self._classes[max(self._classes)]
        return max((entry for entries in tenants.values() for entry in entries), key=lambda entry: entry.arrival)

    def missing_before(self, priority: int) -> int:
        """Prompt tokens to be computed for those of this class and the classes before it."""
        if all(class_ <= priority for class_ in self._classes):
            return self.missing
        before = [tenants for class_, tenants in self._classes.items() if class_ <= priority]
        return sum(entry.missing for tenants in before for entries in tenants.values() for entry in entries)

    def lag(self, entry: Waiting) -> float:
        """Virtual tokens by which its tenant is behind the one that was served most of those in its class."""
        tenants = self._classes[entry.priority]
        return max(map(self.counters.of, tenants)) - self.counters.of(entry.tenant) if len(tenants) > 1 else 0.0

    def lead(self, entry: Waiting) -> float:
        """Virtual tokens by which its tenant is ahead of the one that was served least of those in its class."""
        tenants = self._classes[entry.priority]
        return self.counters.of(entry.tenant) - min(map(self.counters.of, tenants)) if len(tenants) > 1 else 0.0

    def _insert(self, entry: Waiting) -> None:
        insort(self._classes.setdefault(entry.priority, {}).setdefault(entry.tenant, []), entry, key=_turn)

    def _take_out(self, entry: Waiting) -> bool:
        tenants = self._classes.get(entry.priority, {})
        entries = tenants.get(entry.tenant, [])
        place = bisect_left(entries, _turn(entry), key=_turn)
        while place < len(entries) and entries[place] is not entry:
            place += 1
        if place == len(entries):
            return False
        del entries[place]
        if not entries:
            del tenants[entry.tenant]
            if not tenants:
                del self._classes[entry.priority]
        return True


def _turn(entry: Waiting) -> float:
    return entry.missing + AGEING_TOKENS_S * entry.arrival

"""What each tenant was served, in virtual tokens: the virtual token counter of Sheng et al., OSDI 2024.

The tenant with the least counter goes first. Here a token costs what it costs the fleet: a cached one a tenth of a
computed one, a generated one twice as much. Who comes back after a pause is lifted to the least counter of those who
wait, so that nobody saves up.
"""

from collections.abc import Iterable

MISSING_COST = 1.0
OUTPUT_COST = 2.0
CACHED_COST = 0.1
# Beyond this many, unless told otherwise, the tenants with the least counters are forgotten: they lose nothing that
# lifting would not take.
MAX_TENANTS = 10_000


class VirtualCounters:
    """The counters of all tenants, idle ones included: leaving and coming back must not clear a debt.

    Args:
        max_tenants: most that are remembered.
    """

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._counters: dict[str, float] = {}
        # The counter of the last one that left: the floor while nobody waits.
        self._floor = 0.0

    def of(self, tenant: str) -> float:
        """A tenant's counter."""
        return self._counters.get(tenant, self._floor)

    def join(self, tenant: str, waiting: Iterable[str]) -> None:
        """A tenant that had nothing waiting has now; ``waiting`` are the tenants that have already."""
        floor = min(map(self.of, waiting), default=self._floor)
        self._counters[tenant] = max(self.of(tenant), floor)
        if len(self._counters) > self._max_tenants:
            kept = sorted(self._counters, key=self.of, reverse=True)[: self._max_tenants // 2]
            self._counters = {name: self._counters[name] for name in {*kept, tenant, *waiting}}

    def leave(self, tenant: str) -> None:
        """The last of a tenant's requests waits no more."""
        self._floor = max(self._floor, self.of(tenant))

    def charge(self, tenant: str, *, missing: int = 0, cached: int = 0, output: int = 0) -> None:
        """A tenant was served so many tokens."""
        self._counters[tenant] = self.of(tenant) + cost(missing=missing, cached=cached, output=output)


def cost(*, missing: int = 0, cached: int = 0, output: int = 0) -> float:
    """Tokens in virtual ones."""
    return MISSING_COST * missing + CACHED_COST * cached + OUTPUT_COST * output

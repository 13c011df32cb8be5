"""What tenants were served, on two levels: each account, and within an account each of its users.

A tenant is ``ACCOUNT`` or ``ACCOUNT/USER``. Accounts share the fleet; an account's users share what it gets. So nobody
gets more by calling himself many users.
"""

from collections.abc import Iterable

from router.routing.virtual_counters import VirtualCounters

# Of one account; beyond this many, those that were served least are forgotten.
MAX_USERS = 1000
# Accounts whose users are told apart; beyond this many, the one that was so for the longest time starts anew.
MAX_SHARED_ACCOUNTS = 1000


def account_of(tenant: str) -> str:
    """The account of a tenant."""
    return tenant.partition("/")[0]


class TenantCounters:
    """The counters of all tenants."""

    def __init__(self) -> None:
        self._accounts = VirtualCounters()
        # By account.
        self._users: dict[str, VirtualCounters] = {}

    def of_account(self, account: str) -> float:
        """An account's counter."""
        return self._accounts.of(account)

    def of_user(self, tenant: str) -> float:
        """A user's counter, to be compared with those of other users of the account."""
        users = self._users.get(account_of(tenant))
        return users.of(tenant) if users is not None else 0.0

    def join(self, tenant: str, accounts: Iterable[str], users: Iterable[str]) -> None:
        """A tenant that had nothing waiting has now.

        Args:
            tenant: who.
            accounts: those that have something waiting.
            users: the tenants of the same account that have.
        """
        account = account_of(tenant)
        users = list(users)
        if not users:
            self._accounts.join(account, accounts)
        if account not in self._users:
            if len(self._users) >= MAX_SHARED_ACCOUNTS:
                del self._users[next(iter(self._users))]
            self._users[account] = VirtualCounters(MAX_USERS)
        self._users[account].join(tenant, users)

    def leave(self, tenant: str, *, last: bool) -> None:
        """The last of a tenant's requests waits no more; ``last``: nothing of its account waits."""
        account = account_of(tenant)
        if account in self._users:
            self._users[account].leave(tenant)
        if last:
            self._accounts.leave(account)

    def charge(self, tenant: str, *, missing: int = 0, cached: int = 0, output: int = 0) -> None:
        """A tenant was served so many tokens."""
        account = account_of(tenant)
        self._accounts.charge(account, missing=missing, cached=cached, output=output)
        users = self._users.get(account)
        if users is not None:
            users.charge(tenant, missing=missing, cached=cached, output=output)

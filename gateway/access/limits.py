"""Limits of one key: what it has used in the last minute, and what runs. No I/O and no clock: time is passed in."""

import math
from collections import deque

from gateway.errors import ApiError
from gateway.output_policy.text_filter import CompiledPolicy
from protos.api_keys import ApiKey

MINUTE_S = 60


class MinuteWindow:
    """Adds up what happened in the last minute, second by second, so that its memory does not grow with its limit.

    What happened counts for a minute and for the rest of its second: never too short.

    Args:
        limit: there is room while the sum is below.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # (second, sum) in order of time.
        self._sums: deque[list[int]] = deque()
        self._total = 0

    def add(self, now: float, amount: int) -> None:
        """Notes an amount. Seconds must not run backwards."""
        self._forget(now)
        second = math.floor(now)
        if not self._sums or self._sums[-1][0] != second:
            self._sums.append([second, 0])
        self._sums[-1][1] += amount
        self._total += amount

    def wait(self, now: float) -> float:
        """Seconds until there is room; 0 when there is."""
        self._forget(now)
        left = self._total
        if left < self._limit:
            return 0.0
        for second, amount in self._sums:
            left -= amount
            if left < self._limit:
                return second + 1 + MINUTE_S - now
        raise AssertionError("an empty window has room")

    def _forget(self, now: float) -> None:
        while self._sums and self._sums[0][0] + 1 + MINUTE_S <= now:
            self._total -= self._sums.popleft()[1]


class KeyUse:
    """What a key is used for now and was in the last minute.

    Attributes:
        key: whose use it is.
        policy: of its outputs, if it has one.
        running: requests that were admitted and did not end.

    Raises:
        PatternError: a pattern of the policy cannot be used.
    """

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.policy = None if key.output_policy is None else CompiledPolicy.of(key.output_policy)
        self.running = 0
        self._requests = None if key.requests_per_minute is None else MinuteWindow(key.requests_per_minute)
        self._tokens = None if key.tokens_per_minute is None else MinuteWindow(key.tokens_per_minute)

    def admit(self, now: float) -> None:
        """Counts one more request as running; ``end`` must follow.

        Raises:
            ApiError (429): one of the key's limits is reached; ``retry_after`` says when that is over.
        """
        most = self.key.max_concurrent_requests
        if most is not None and self.running >= most:
            raise _refusal(f"This key may have {most} requests at a time.", 1)
        _check_room(self._tokens, now, f"{self.key.tokens_per_minute} tokens")
        self.count(now)
        self.running += 1

    def count(self, now: float) -> None:
        """Counts a request, also one that generates nothing and only asks for tokens.

        Raises:
            ApiError (429): there were too many in the last minute.
        """
        _check_room(self._requests, now, f"{self.key.requests_per_minute} requests")
        if self._requests is not None:
            self._requests.add(now, 1)

    def charge(self, now: float, tokens: int) -> None:
        """Notes tokens that were used. They may pass the limit: what runs goes on, and others wait for longer."""
        if self._tokens is not None and tokens:
            self._tokens.add(now, tokens)

    def end(self) -> None:
        """A request that was admitted has ended."""
        self.running -= 1


def _check_room(window: MinuteWindow | None, now: float, limit: str) -> None:
    if window is not None and (wait := window.wait(now)):
        raise _refusal(f"This key may use {limit} a minute.", math.ceil(wait))


def _refusal(message: str, retry_after: int) -> ApiError:
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", retry_after=max(1, retry_after))

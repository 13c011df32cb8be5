"""The layer that lets nobody in without a key, where the server has keys."""

import hmac
import time
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.limits import KeyUse
from gateway.error_replies import error_reply
from gateway.errors import ApiError
from protos.api_keys import ApiKey, digest_of

# The built-in page is no secret; what it then asks for needs a key, which is typed into it.
PAGE_PATHS = frozenset(("/", "/page/style.css", "/page/api.js", "/page/chat.js", "/page/fleet.js"))
# What those ask who watch over processes and have no keys: it says whether this one serves, and nothing else.
OPEN_PATHS = PAGE_PATHS | {"/livez", "/readyz", "/health"}
_MAX_KEY_CHARS = 1024


class KeyRing:
    """All keys of the server, and what they are used for."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._uses = [KeyUse(key) for key in keys]

    def find(self, presented: str) -> KeyUse | None:
        """The key that was presented, if it is one. Takes the same time whichever it is, and when it is none."""
        digest = digest_of(presented)
        found = None
        for use in self._uses:
            if hmac.compare_digest(use.key.sha256, digest):
                found = use
        return found


class Guard:
    """ASGI middleware: requests pass with a key, as a bearer token or in ``x-api-key``, and are 401 without."""

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            presented = presented_key(Headers(scope=scope))
            use = self._ring.find(presented) if 0 < len(presented) <= _MAX_KEY_CHARS else None
            if use is None:
                await error_reply(scope, _unknown(presented))(scope, receive, send)
                return
            scope.setdefault("state", {})["key_use"] = use
        await self._app(scope, receive, send)


def presented_key(headers: Headers) -> str:
    """The key that a request shows; empty when it shows none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def key_use_of(request: Request) -> KeyUse | None:
    """The use of the key that let a request in; None where the server has no keys."""
    use: KeyUse | None = getattr(request.state, "key_use", None)
    return use


def count_request(request: Request) -> None:
    """Counts a request that generates nothing against its key, if it has one. Raises ApiError (429)."""
    use = key_use_of(request)
    if use is not None:
        use.count(time.monotonic())


def _unknown(presented: str) -> ApiError:
    message = "The API key is not known." if presented else "An API key is needed: Authorization: Bearer KEY."
    return ApiError(401, message, code="invalid_api_key")

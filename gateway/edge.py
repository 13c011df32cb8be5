"""The outermost layer of the app: request ids, the access log, HTTP metrics, and the last catch of exceptions."""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.error_replies import error_reply
from gateway.errors import CLIENT_CLOSED_REQUEST, ApiError, ClientGone, internal
from gateway.metrics import Metrics
from protos.tracing import NO_SPAN, Span, Tracing, carrier_of

logger = logging.getLogger("gateway")

# What comes back in a header and goes into the log must be one harmless word.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

# Asked for every few seconds by machines.
_QUIET = frozenset(("/fleet", "/health", "/livez", "/metrics", "/readyz"))


class Edge:
    """ASGI middleware. Every HTTP request passes it, whatever becomes of it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, max_header_bytes: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request and never raises an Exception."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _take_origin_form(scope)
        request_id = _request_id(scope)
        span = scope.setdefault("state", {})["span"] = _span_of(scope)
        began = time.perf_counter()
        status = 0

        async def send_tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_header_bytes:
                await error_reply(scope, _headers_too_long(self._max_header_bytes))(scope, receive, send_tagged)
                return
            if _has_two_lengths(scope):
                refusal = error_reply(
                    scope, ApiError(400, "A request has Content-Length or Transfer-Encoding, not both.")
                )
                # Where the body ends is anyone's guess, and so is what comes after it.
                refusal.headers["connection"] = "close"
                await refusal(scope, receive, send_tagged)
                return
            await self._app(scope, receive, send_tagged)
        except ClientGone:
            status = CLIENT_CLOSED_REQUEST
        except Exception:
            error = internal(f"request {request_id}")
            if status == 0:
                await error_reply(scope, error)(scope, receive, send_tagged)
        finally:
            self._record(scope, request_id, status, time.perf_counter() - began, span)

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float, span: Span) -> None:
        # The route's pattern, since paths are the clients' to invent.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.http_requests.labels(route, str(status)).inc()
        level = logging.DEBUG if route in _QUIET else logging.INFO
        if logger.isEnabledFor(level):
            generation = scope["state"].get("generation_id", "-")
            logger.log(
                level, "%s %s %d %.3fs request=%s generation=%s%s",
                scope["method"], route, status, seconds, request_id, generation,
                f" trace={span.trace_id}" if span.trace_id else "", extra={"trace_id": span.trace_id},
            )  # fmt: skip
        if span.recording:
            if "generation_id" not in scope["state"]:
                span.rename(f"{scope['method']} {route}")
            span.set(
                {
                    "http.request.method": scope["method"],
                    "http.route": route,
                    "http.response.status_code": status,
                    "quire.request_id": request_id,
                }
            )
            # What a client got wrong is no failure of the server.
            if status >= CLIENT_CLOSED_REQUEST:
                span.fail(str(status))
        span.end()


def _span_of(scope: Scope) -> Span:
    """A new span, below the client's if it names one."""
    tracing: Tracing = scope["app"].state.tracing
    if not tracing.enabled or scope["path"] in _QUIET:
        return NO_SPAN
    named = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    return tracing.start(scope["method"], carrier_of(named))


def _headers_too_long(most: int) -> ApiError:
    return ApiError(431, f"The headers are longer than {most} bytes.", code="request_header_fields_too_large")


def _has_two_lengths(scope: Scope) -> bool:
    """Whether a body's end is told in two ways, by which two servers could disagree on where a request begins."""
    headers = Headers(scope=scope)
    return "content-length" in headers and "transfer-encoding" in headers


def _take_origin_form(scope: Scope) -> None:
    """Leaves the path of a target that is a whole URL, as proxies are sent and all must take (RFC 9112, 3.2.2)."""
    if scope["path"].startswith(("http://", "https://")):
        for name, slash in (("path", "/"), ("raw_path", b"/")):
            scope[name] = slash + scope[name].split(slash * 2, 1)[-1].partition(slash)[2]


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

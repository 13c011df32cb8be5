"""A request's trace, as the processes on its way see it: spans, and how one process tells the next of its own.

A process that was given a collector sends its spans there (``protos/otlp.py``). One that was not has the classes of
this file, which record nothing and need nothing but the standard library. Times are ``time.monotonic()`` seconds.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from urllib.parse import urlsplit

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
# HTTP headers or gRPC metadata that name a span: W3C's traceparent and tracestate.
Carrier = tuple[tuple[str, str], ...]

_FIELDS = ("traceparent", "tracestate")
# W3C allows a tracestate of 512 characters at least; longer ones are nobody's duty.
_MAX_FIELD_CHARS = 512


class TracingError(ValueError):
    """Traces cannot be sent as it was asked for; the message names the flag and says what to do."""


class Span:
    """One operation of one process. This one records nothing.

    Attributes:
        carrier: tells the next process of it.
        trace_id: 32 hex digits for logs; empty when nothing is recorded.
    """

    __slots__ = ()

    carrier: Carrier = ()
    trace_id = ""

    @property
    def recording(self) -> bool:
        """Whether there is any use in telling it something."""
        return False

    def rename(self, name: str) -> None:
        """Gives it another name."""

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def child(self, name: str, began: float, ended: float, attributes: Attributes, error: str = "") -> None:
        """A part of the operation, which is over. ``error`` is its kind, if it failed."""

    def fail(self, error: str) -> None:
        """The operation failed; ``error`` is the kind of failure, of few values."""

    def end(self) -> None:
        """The operation is over."""


NO_SPAN = Span()


class Tracing:
    """Makes the spans of one process. This one makes spans that record nothing.

    Attributes:
        enabled: whether it makes others.
    """

    enabled = False

    def start(self, name: str, parent: Carrier = ()) -> Span:
        """Begins a span below the one that ``parent`` names, or a trace of its own. The caller ends it."""
        return NO_SPAN

    def join(self, parent: Carrier) -> Span:
        """Another process's span, to put children below it."""
        return NO_SPAN

    async def close(self) -> None:
        """Sends what is left, for two seconds at most."""


def tracing_to(endpoint: str | None, service: str, on_dropped: Callable[[int], None] = lambda count: None) -> Tracing:
    """What sends spans to a collector; None: there is none.

    Args:
        endpoint: of OTLP over gRPC, say http://collector:4317.
        service: the process's name in traces.
        on_dropped: called, from any thread, with the number of spans that could not be sent.

    Raises:
        TracingError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return Tracing()
    try:
        from protos.otlp import OtlpTracing
    except ImportError as error:
        raise TracingError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); install it with: pip install 'quire[tracing]'"
        ) from error
    return OtlpTracing(endpoint, service, on_dropped)


def carrier_of(fields: Iterable[tuple[str, str | bytes]]) -> Carrier:
    """The fields that name a span, among those of a request. What is too long to be one is left out."""
    return tuple(
        (name, value)
        for name, value in fields
        if name in _FIELDS and isinstance(value, str) and len(value) <= _MAX_FIELD_CHARS
    )


def add_tracing_argument(group: "argparse._ArgumentGroup | argparse.ArgumentParser") -> None:
    """Adds ``--otlp-traces-endpoint``."""
    group.add_argument(
        "--otlp-traces-endpoint", type=_endpoint, default=None, metavar="URL",
        help="where an OpenTelemetry collector takes traces by OTLP over gRPC, say http://localhost:4317; sampling and "
        "all else are set by OpenTelemetry's own variables, say OTEL_TRACES_SAMPLER (default: no traces)",
    )  # fmt: skip


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        fits = False
    if not fits or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is no http://HOST:PORT or https://HOST:PORT")
    return text

"""Spans by OpenTelemetry's SDK, sent by OTLP over gRPC on a thread of its own. Imported where traces are asked for."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from protos.tracing import NO_SPAN, Attributes, Carrier, Span, Tracing

logger = logging.getLogger("tracing")

# Spans that wait to be sent; later ones are dropped.
MAX_WAITING = 4096
_BATCH = 512
_CLOSE_S = 2.0
_PROPAGATOR = TraceContextTextMapPropagator()


class OtlpTracing(Tracing):
    """Makes spans and sends them. See ``tracing_to`` for the arguments."""

    enabled = True

    def __init__(self, endpoint: str, service: str, on_dropped: Callable[[int], None]) -> None:
        # It repeats itself while a collector is away; what there is to say of that is said below.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        processor = _BoundedProcessor(OTLPSpanExporter(endpoint=endpoint), endpoint, on_dropped)
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire")

    def start(self, name: str, parent: Carrier = ()) -> Span:
        """See ``Tracing``."""
        above = _PROPAGATOR.extract(dict(parent), Context())
        clock = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(name, above, SpanKind.SERVER, start_time=clock + time.monotonic_ns())
        return _OtlpSpan(self._tracer, span, set_span_in_context(span, Context()), clock)

    def join(self, parent: Carrier) -> Span:
        """See ``Tracing``."""
        above = _PROPAGATOR.extract(dict(parent), Context())
        return _JoinedSpan(self._tracer, above, time.time_ns() - time.monotonic_ns()) if above else NO_SPAN

    async def close(self) -> None:
        """See ``Tracing``."""
        # The SDK waits for as long as its exporter tries, half a minute: nobody is to wait for that thread.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        deadline = time.monotonic() + _CLOSE_S
        while closing.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110 - a thread sets no asyncio.Event
            await asyncio.sleep(0.01)


class _JoinedSpan(Span):
    """A span that another process began and will end."""

    __slots__ = ("_clock", "_context", "_tracer")

    def __init__(self, tracer: Tracer, context: Context, clock: int) -> None:
        self._tracer = tracer
        # Children are put into it.
        self._context = context
        # Nanoseconds between the epoch and where the monotonic clock begins: one for all of a span's times.
        self._clock = clock

    @property
    def recording(self) -> bool:
        """See ``Span``."""
        return True

    def child(self, name: str, began: float, ended: float, attributes: Attributes, error: str = "") -> None:
        """See ``Span``."""
        span = self._tracer.start_span(
            name, self._context, attributes=dict(attributes), start_time=self._clock + int(began * 1e9)
        )
        if error:
            _fail(span, error)
        span.end(self._clock + int(ended * 1e9))


class _OtlpSpan(_JoinedSpan):
    __slots__ = ("_span", "carrier", "trace_id")

    def __init__(self, tracer: Tracer, span: OtelSpan, context: Context, clock: int) -> None:
        super().__init__(tracer, context, clock)
        self._span = span
        fields: dict[str, str] = {}
        _PROPAGATOR.inject(fields, context)
        self.carrier = tuple(fields.items())
        self.trace_id = format_trace_id(span.get_span_context().trace_id) if span.is_recording() else ""

    @property
    def recording(self) -> bool:
        """See ``Span``."""
        return self._span.is_recording()

    def rename(self, name: str) -> None:
        """See ``Span``."""
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """See ``Span``."""
        self._span.set_attributes(dict(attributes))

    def fail(self, error: str) -> None:
        """See ``Span``."""
        _fail(self._span, error)

    def end(self) -> None:
        """See ``Span``."""
        self._span.end(self._clock + time.monotonic_ns())


def _fail(span: OtelSpan, error: str) -> None:
    span.set_attribute("error.type", error)
    span.set_status(Status(StatusCode.ERROR))


class _BoundedProcessor(BatchSpanProcessor):
    """Sends spans in batches from a queue with a bound, and tells of those that are lost."""

    def __init__(self, exporter: SpanExporter, endpoint: str, on_dropped: Callable[[int], None]) -> None:
        self._on_dropped = on_dropped
        self._sender = _CountingExporter(exporter, endpoint, on_dropped)
        self._ended = 0
        # A little more than what is let in: the count of those taken out may be behind.
        super().__init__(self._sender, max_queue_size=MAX_WAITING + _BATCH, max_export_batch_size=_BATCH)

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span that is over."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._ended - self._sender.taken >= MAX_WAITING:
            self._on_dropped(1)
            return
        self._ended += 1
        super().on_end(span)


class _CountingExporter(SpanExporter):
    """Counts what could not be sent, and says once when that begins and when it ends.

    Attributes:
        taken: spans that were handed to it.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str, on_dropped: Callable[[int], None]) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._on_dropped = on_dropped
        self._lost = 0
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch; returns whether it arrived."""
        self.taken += len(spans)
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                logger.warning("%s takes traces again; %d spans were lost", self._endpoint, self._lost)
                self._lost = 0
            return result
        if not self._lost:
            logger.warning("%s takes no traces; spans are dropped until it does", self._endpoint)
        self._lost += len(spans)
        self._on_dropped(len(spans))
        return result

    def shutdown(self) -> None:
        """Ends it."""
        self._exporter.shutdown()

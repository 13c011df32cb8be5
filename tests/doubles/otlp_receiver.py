"""A collector: takes traces by OTLP over gRPC and keeps them."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2

from tests.doubles.processes import wait_until


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it was sent. Times are nanoseconds since the epoch."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    failed: bool


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """The service, and what it was sent."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.address = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [
                    ReceivedSpan(
                        service, span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                        span.start_time_unix_nano, span.end_time_unix_nano, _attributes(span.attributes),
                        span.status.code == span.status.STATUS_CODE_ERROR,
                    )
                    for span in scope.spans
                ]  # fmt: skip
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """What came of one trace, by beginning."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start)

    def until_complete(self, trace_id: str, *names: str) -> dict[str, ReceivedSpan]:
        """Waits for spans of a trace, by name, and returns all that came by then."""
        wait_until(lambda: set(names) <= {span.name for span in self.trace(trace_id)})
        return {span.name: span for span in self.trace(trace_id)}


@contextmanager
def otlp_receiver(port: int = 0) -> Iterator[OtlpReceiver]:
    """A running receiver."""
    receiver = OtlpReceiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None

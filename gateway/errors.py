"""What goes wrong, as clients see it: the OpenAI error object, and the one place where gRPC statuses become HTTP.

Text of Python exceptions and of the gRPC library never gets into an error object.
"""

import logging
import math
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

logger = logging.getLogger("gateway")

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

# HTTP has no status for a client that went away; it is logged, and sent only when the router cancelled the request.
CLIENT_CLOSED_REQUEST = 499
DEFAULT_RETRY_AFTER_S = 1

ParamOf = Callable[[str], str | None]
"""Turns the router's name of a field into the client's."""


class ApiError(Exception):
    """An answer with an OpenAI error object. Whoever raises it writes ``message`` for the client to read.

    ``retry_after`` is in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON object to send."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """The headers to send beside the body."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 about one field of the request."""
    return ApiError(400, message, param=param, code=code)


def internal(reason: str) -> ApiError:
    """A 500 that says nothing but an id; ``reason`` is logged under that id."""
    error_id = uuid.uuid4().hex
    logger.error("internal error %s: %s", error_id, reason, exc_info=sys.exception())
    return ApiError(
        500, f"Internal error {error_id}. The server's log says more.", type=SERVER_ERROR, code="internal_error"
    )


def unavailable(message: str, retry_after: int = DEFAULT_RETRY_AFTER_S) -> ApiError:
    """A 503: the same request may well succeed later."""
    return ApiError(503, message, type=SERVER_ERROR, code="service_unavailable", retry_after=retry_after)


@dataclass(frozen=True)
class _Row:
    """How one gRPC status is answered."""

    status: int
    type: str
    code: str | None
    # Sent when the router gave no details: then the message may be the gRPC library's, which names addresses.
    message: str
    # Whether clients are told when to try again.
    retry: bool = False


_ROWS = {
    grpc.StatusCode.INVALID_ARGUMENT: _Row(400, INVALID_REQUEST, None, "The request is not valid."),
    grpc.StatusCode.NOT_FOUND: _Row(404, INVALID_REQUEST, "model_not_found", "The model does not exist."),
    grpc.StatusCode.ALREADY_EXISTS: _Row(409, INVALID_REQUEST, "already_exists", "A running request has this id."),
    grpc.StatusCode.RESOURCE_EXHAUSTED: _Row(
        429, "rate_limit_error", "rate_limit_exceeded", "Too many requests are waiting; try again shortly.", True
    ),
    grpc.StatusCode.CANCELLED: _Row(
        CLIENT_CLOSED_REQUEST, INVALID_REQUEST, "request_cancelled", "The request was cancelled."
    ),
    grpc.StatusCode.UNAVAILABLE: _Row(
        503, SERVER_ERROR, "service_unavailable", "The model is not available now; try again shortly.", True
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: _Row(504, SERVER_ERROR, "timeout", "The request took too long and was ended."),
}  # fmt: skip


def from_rpc(error: grpc.aio.AioRpcError, param_of: ParamOf) -> ApiError:
    """The answer to a failed call. What is not in the table of docs/architecture.md is our fault: a 500."""
    row = _ROWS.get(error.code())
    details = _Details.of(error)
    if details.reason == "REQUEST_QUARANTINED":
        return ApiError(500, details.message, type=SERVER_ERROR, code="request_quarantined")
    if row is None:
        return internal(f"router: {error.code().name}: {error.details()}")
    param = param_of(details.field) if details.field else None
    code = row.code
    if details.reason == "CONTEXT_LENGTH_EXCEEDED":
        code = "context_length_exceeded"
    return ApiError(
        row.status,
        details.message or row.message,
        type=row.type,
        param=param or ("model" if code == "model_not_found" else None),
        code=code,
        retry_after=(details.retry_after or DEFAULT_RETRY_AFTER_S) if row.retry else None,
    )


@dataclass
class _Details:
    """What the router put into a status on purpose."""

    message: str = ""
    field: str = ""
    reason: str = ""
    retry_after: int = 0

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> "_Details":
        details = cls()
        try:
            status = rpc_status.from_call(error)
        except (ValueError, DecodeError):
            status = None
        if status is None:
            # The gRPC library itself uses none of these three, so the router wrote the message.
            if error.code() in (
                grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS,
            ):  # fmt: skip
                details.message = error.details() or ""
            return details
        details.message = status.message
        for packed in status.details:
            details._unpack(packed)
        return details

    def _unpack(self, packed: Any) -> None:
        request, info, retry = (
            error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(),
        )  # fmt: skip
        try:
            if packed.Unpack(request) and request.field_violations:
                self.field = request.field_violations[0].field
            elif packed.Unpack(info):
                self.reason = info.reason
            elif packed.Unpack(retry):
                self.retry_after = max(1, math.ceil(retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9))
        except DecodeError:
            logger.warning("a detail of a router's status cannot be read: %s", packed.type_url)

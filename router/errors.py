"""What can go wrong with a request, and how each case is told over gRPC.

RequestError
├── InvalidRequest     INVALID_ARGUMENT    a field is wrong; BadRequest names it
│   └── ContextExceeded                    prompt and output do not fit the context
├── UnknownModel       NOT_FOUND
├── DuplicateRequest   ALREADY_EXISTS      a running request has this id
├── QueueFull          RESOURCE_EXHAUSTED  RetryInfo says when to try again
├── Unavailable        UNAVAILABLE         no worker is ready, or the request's worker was lost; RetryInfo
├── Cancelled          CANCELLED           by the Cancel call
├── DeadlineExceeded   DEADLINE_EXCEEDED
└── InternalError      INTERNAL            our fault; the message has an id that the log has too
"""

import secrets
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc.aio import ServicerContext

DOMAIN = "quire"
_DETAILS_KEY = "grpc-status-details-bin"


class RequestError(Exception):
    """A request cannot go on; the message is for its client."""

    code: grpc.StatusCode

    def details(self) -> list[message.Message]:
        """google.rpc details beside the message."""
        return []


class InvalidRequest(RequestError):
    """A field is wrong.

    Args:
        field: its path in the request, such as ``stopping.max_tokens``.
        description: what was wrong and what is wanted.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description

    def details(self) -> list[message.Message]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.description)
        return [error_details_pb2.BadRequest(field_violations=[violation])]


class ContextExceeded(InvalidRequest):
    """Prompt and output do not fit the context."""

    def details(self) -> list[message.Message]:
        return [*super().details(), _reason("CONTEXT_LENGTH_EXCEEDED")]


class UnknownModel(RequestError):
    """The model is not served."""

    code = grpc.StatusCode.NOT_FOUND

    def details(self) -> list[message.Message]:
        return [_reason("MODEL_NOT_FOUND")]


class DuplicateRequest(RequestError):
    """A running request has this id."""

    code = grpc.StatusCode.ALREADY_EXISTS

    def details(self) -> list[message.Message]:
        return [_reason("REQUEST_ID_IN_USE")]


class QueueFull(RequestError):
    """Too many requests wait, or this one waited too long.

    Args:
        text: for the client.
        retry_after: seconds.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after

    def details(self) -> list[message.Message]:
        return [_retry(self.retry_after)]


class Unavailable(RequestError):
    """No worker is ready, or the worker of a running request was lost."""

    code = grpc.StatusCode.UNAVAILABLE

    def details(self) -> list[message.Message]:
        return [_retry(1.0)]


class Cancelled(RequestError):
    """The Cancel call ended the request."""

    code = grpc.StatusCode.CANCELLED


class DeadlineExceeded(RequestError):
    """The call's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class InternalError(RequestError):
    """Our fault. The client gets an id; what happened goes into the log under it."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        super().__init__(f"internal error {self.id}; the server's log says more under this id")


async def abort(context: "ServicerContext[Any, Any]", error: RequestError) -> NoReturn:
    """Ends a call with the error's status and details."""
    details = []
    for detail in error.details():
        packed = any_pb2.Any()
        packed.Pack(detail)
        details.append(packed)
    number, _ = error.code.value
    status = status_pb2.Status(code=code_pb2.Code.ValueType(number), message=str(error), details=details)
    await context.abort(error.code, str(error), trailing_metadata=((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort raises")


def _reason(reason: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)


def _retry(seconds: float) -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(
        retry_delay=duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
    )

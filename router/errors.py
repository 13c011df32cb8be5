"""What a call can fail with, and the one place that turns it into a gRPC status with google.rpc details.

::

    RequestError
    ├── InvalidArgument          INVALID_ARGUMENT    BadRequest names the field
    │   └── ContextTooLong       INVALID_ARGUMENT    and ErrorInfo CONTEXT_LENGTH_EXCEEDED
    ├── ModelNotFound            NOT_FOUND           ErrorInfo MODEL_NOT_FOUND
    ├── RequestExists            ALREADY_EXISTS      ErrorInfo REQUEST_ID_IN_USE
    ├── QueueFull                RESOURCE_EXHAUSTED  RetryInfo
    ├── Unavailable              UNAVAILABLE         RetryInfo
    ├── RequestCancelled         CANCELLED
    ├── DeadlineExceeded         DEADLINE_EXCEEDED
    ├── RequestQuarantined       INTERNAL            ErrorInfo REQUEST_QUARANTINED
    └── InternalError            INTERNAL            the message is an id that the log has too

Every message is written for the client. What Python says of an unforeseen exception goes to the log only.
"""

import asyncio
import functools
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import ServicerContext
from grpc_status import rpc_status

logger = logging.getLogger(__name__)

DOMAIN = "quire"
RETRY_AFTER_S = 1.0

Reply = TypeVar("Reply")


class RequestError(Exception):
    """A call that ends with a status other than OK; the message is for the client to read."""

    code = grpc.StatusCode.UNKNOWN
    retry = False
    retry_after_s = RETRY_AFTER_S
    # What ErrorInfo says, for programs.
    reason = ""

    def details(self) -> list[Message]:
        """The google.rpc messages that go with the status."""
        details: list[Message] = []
        if self.reason:
            details.append(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN))
        if self.retry:
            delay = Duration()
            delay.FromMilliseconds(round(self.retry_after_s * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        return details


class InvalidArgument(RequestError):
    """A field of the request is wrong. ``field`` is its path, say ``chat.messages[0].role``; empty: not known."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def details(self) -> list[Message]:
        if not self.field:
            return super().details()
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=str(self))
        return [error_details_pb2.BadRequest(field_violations=[violation]), *super().details()]


class ContextTooLong(InvalidArgument):
    """Prompt and output do not fit the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class ModelNotFound(RequestError):
    """The request names a model that is not served."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class RequestExists(RequestError):
    """A running request has this id."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "REQUEST_ID_IN_USE"


class QueueFull(RequestError):
    """Too many requests wait already, or this one waited too long. ``retry_after_s``: when there should be room."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = True

    def __init__(self, message: str, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(RequestError):
    """No worker is ready, too many were lost with the request, or the router is shutting down."""

    code = grpc.StatusCode.UNAVAILABLE
    retry = True


class RequestCancelled(RequestError):
    """The request was cancelled by the Cancel call."""

    code = grpc.StatusCode.CANCELLED


class DeadlineExceeded(RequestError):
    """The call's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class RequestQuarantined(RequestError):
    """Workers crashed while they ran the request; it is kept from the others."""

    code = grpc.StatusCode.INTERNAL
    reason = "REQUEST_QUARANTINED"


class InternalError(RequestError):
    """Our fault. ``cause`` is logged under an id, which is all that the client learns."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, cause: str, *, trace: bool = False) -> None:
        error_id = uuid.uuid4().hex
        super().__init__(f"Internal error {error_id}. The server's log says more.")
        logger.error("internal error %s: %s", error_id, cause, exc_info=trace)


def to_status(error: RequestError) -> grpc.Status:
    """The status of a failed call, with its details inside."""
    status = status_pb2.Status(code=error.code.value[0], message=str(error))
    for detail in error.details():
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    converted: grpc.Status = rpc_status.to_status(status)
    return converted


# From a message that could not be sent to the news that its client has hung up, generously.
_CANCELLATION_S = 1.0


def answers_errors(method: Callable[..., Awaitable[Reply]]) -> Callable[..., Awaitable[Reply]]:
    """Makes a servicer's method end its call with the status of the RequestError that it raises, or with INTERNAL."""

    @functools.wraps(method)
    async def answering(servicer: object, request: Message, context: "ServicerContext[Any, Any]") -> Reply:
        try:
            return await method(servicer, request, context)
        except RequestError as caught:
            error = caught
        except grpc.aio.InternalError as caught:
            # Something could not be sent. Where the client hung up meanwhile, this call is about to be cancelled.
            await asyncio.sleep(_CANCELLATION_S)
            error = InternalError(f"{method.__name__}: {type(caught).__name__}", trace=True)
        except Exception as caught:
            error = InternalError(f"{method.__name__}: {type(caught).__name__}", trace=True)
        await context.abort_with_status(to_status(error))
        raise AssertionError("abort_with_status raises")

    return answering

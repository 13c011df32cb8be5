"""Answers messages that cannot be parsed: left to itself, gRPC calls them UNKNOWN, and logs a traceback for each."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from protos import inference_pb2

logger = logging.getLogger(__name__)

_OURS = f"/{inference_pb2.DESCRIPTOR.package}."


class MessageCheck(grpc.aio.ServerInterceptor):
    """Ends calls of our services whose request cannot be parsed as INVALID_ARGUMENT. None of them streams requests."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of a call, which looks first whether there is a message."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(_OURS):
            return handler
        parse = handler.request_deserializer

        def parse_or_tell(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError as error:
                return error

        async def answer(request: Any, context: Any) -> Any:
            if isinstance(request, DecodeError):
                logger.info("a call of %s had a message that cannot be parsed", method)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be parsed as this call's")
            return await behavior(request, context)

        if handler.response_streaming:
            behavior = handler.unary_stream
            return grpc.unary_stream_rpc_method_handler(answer, parse_or_tell, handler.response_serializer)
        behavior = handler.unary_unary
        return grpc.unary_unary_rpc_method_handler(answer, parse_or_tell, handler.response_serializer)

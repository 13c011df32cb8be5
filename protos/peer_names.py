"""Lets only clients in whose certificate has one of some names: an authority may vouch for more than one role."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc

_SUBJECT_ALT_NAMES = "x509_subject_alternative_name"


class PeerNames(grpc.aio.ServerInterceptor):
    """Ends calls of clients with other names as PERMISSION_DENIED.

    Args:
        names: DNS names or IP addresses, as subjectAltName has them.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of a call, which looks at the client's certificate first."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = f"{_streams(handler.request_streaming)}_{_streams(handler.response_streaming)}"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        checked = self._checked(getattr(handler, kind))
        return make(checked, handler.request_deserializer, handler.response_serializer)

    def _checked(self, method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        if inspect.isasyncgenfunction(method):

            async def iterate(request: Any, context: Any) -> AsyncIterator[Any]:
                await self._check(context)
                async for response in method(request, context):
                    yield response

            return iterate

        async def call(request: Any, context: Any) -> Any:
            await self._check(context)
            return await method(request, context)

        return call

    async def _check(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        has = {name.decode(errors="replace") for name in context.auth_context().get(_SUBJECT_ALT_NAMES, ())}
        if not has & self._names:
            shown = ", ".join(sorted(has)) or "no name"
            message = f"the client's certificate is for {shown}; --ssl-client-names wants {', '.join(self._names)}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, message)


def _streams(streams: bool) -> str:
    return "stream" if streams else "unary"

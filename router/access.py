"""Who may call over gRPC where the router has keys: calls are asked for one, and requests held to what it may do."""

import hmac
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from protos import inference_pb2, registry_pb2
from protos.api_keys import ApiKey, digest_of
from router.errors import InvalidArgument

# What those ask who watch over processes and have no keys: it says whether this one serves, and nothing else.
_OPEN = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/"
# Whoever registers workers is sent prompts: a client's key is not enough.
_OWN = f"/{registry_pb2.DESCRIPTOR.services_by_name['Registry'].full_name}/"
_MAX_KEY_CHARS = 1024

# The key of the client whose call this is; None: there are no keys, or it is the processes' own.
_caller: ContextVar[ApiKey | None] = ContextVar("caller", default=None)


class KeyCheck(grpc.aio.ServerInterceptor):
    """Ends calls without a known key as UNAUTHENTICATED, all but those of the health service.

    Args:
        keys: of clients.
        own_key: SHA-256 of the one that gateways and workers have; None: they have none of their own.
    """

    def __init__(self, keys: tuple[ApiKey, ...], own_key: bytes | None) -> None:
        self._keys = keys
        self._own_key = own_key

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of a call, or one that ends it."""
        method = str(handler_call_details.method)
        if not method.startswith(_OPEN):
            presented = _presented(handler_call_details)
            digest = digest_of(presented)
            is_own = self._own_key is not None and hmac.compare_digest(self._own_key, digest)
            # All are compared, so that the time taken tells nothing of which comes close.
            known = [key for key in self._keys if hmac.compare_digest(key.sha256, digest)]
            if not presented or len(presented) > _MAX_KEY_CHARS or not (is_own or known):
                return _refusal("the API key is not known" if presented else "an API key is needed")
            if method.startswith(_OWN) and not is_own:
                return _refusal("workers register with the processes' own key, not with a client's")
            _caller.set(None if is_own else known[0])
        return await continuation(handler_call_details)


def hold_to_key(request: inference_pb2.GenerateRequest) -> None:
    """Makes a request one of the account of the key that its call was made with; its own tenant is a user there.

    Raises:
        InvalidArgument: it asks for a more urgent class than the key may have.
    """
    key = _caller.get()
    if key is None:
        return
    request.tenant = f"{key.account}/{request.tenant}" if request.tenant else key.account
    if key.priority_ceiling is not None:
        if request.priority and request.priority < key.priority_ceiling:
            message = f"priority is {request.priority}; this key's requests may have {key.priority_ceiling} or more"
            raise InvalidArgument("priority", message)
        request.priority = max(request.priority, key.priority_ceiling)


def may_cancel(tenant: str) -> bool:
    """Whether a tenant's request is one that this call may end: of its own account, or of any with the own key."""
    key = _caller.get()
    return key is None or tenant.partition("/")[0] == key.account


def _presented(details: grpc.HandlerCallDetails) -> str:
    for name, value in details.invocation_metadata or ():
        if name == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            return token.strip() if scheme.lower() == "bearer" else ""
    return ""


def _refusal(reason: str) -> Any:
    async def refuse(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        message = f"{reason}; it goes into the call's metadata, as authorization: Bearer KEY"
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    # Of this kind whatever the method: it waits for no message.
    return grpc.stream_stream_rpc_method_handler(refuse)

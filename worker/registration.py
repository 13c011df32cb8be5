"""Announces a worker to a router that does not know its address, for as long as it serves."""

import asyncio
import logging

import grpc

from protos import registry_pb2, registry_pb2_grpc
from protos.api_keys import key_metadata
from protos.channel import CHANNEL_OPTIONS, open_channel
from protos.tls import ClientTls, explain_failure

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_CALL_TIMEOUT_S = 5.0


class Registration:
    """One worker at one router's Registry service.

    Args:
        router: the router's HOST:PORT.
        host: where this worker can be reached; empty: whence its calls come.
        port: its port.
        tls: of calls to the router.
        key: to show it, where it asks for keys.
    """

    def __init__(self, router: str, host: str, port: int, tls: ClientTls | None = None, key: str = "") -> None:
        self._router = router
        self._tls = tls
        self._metadata = key_metadata(key)
        self._request = registry_pb2.RegisterRequest(host=host, port=port)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Registers, and renews it until ``leave``. A router that is away is told when it is back."""
        self._task = asyncio.create_task(self._keep(), name=f"registration at {self._router}")

    async def leave(self) -> None:
        """Says that this worker takes no more sequences. Returns when the router knows, or does not answer."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._request.leaving = True
        async with open_channel(self._router, CHANNEL_OPTIONS, self._tls) as channel:
            try:
                await self._register(channel)
            except grpc.aio.AioRpcError as error:
                logger.info("router %s was not told of the end: %s", self._router, error.details())

    async def _keep(self) -> None:
        fault = ""
        async with open_channel(self._router, CHANNEL_OPTIONS, self._tls) as channel:
            while True:
                wait = _RETRY_S
                try:
                    wait = await self._register(channel)
                    fault = ""
                except grpc.aio.AioRpcError as error:
                    if (said := _said(error, self._tls)) != fault:
                        logger.warning("cannot register at router %s: %s", self._router, said)
                        fault = said
                await asyncio.sleep(wait)

    async def _register(self, channel: grpc.aio.Channel) -> float:
        """Returns the seconds after which to register again."""
        stub = registry_pb2_grpc.RegistryStub(channel)
        reply: registry_pb2.RegisterResponse = await stub.Register(
            self._request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata
        )
        return max(reply.renew_after_ms / 1000, _RETRY_S)


def _said(error: grpc.aio.AioRpcError, tls: ClientTls | None) -> str:
    return f"{error.code().name}: {explain_failure(error.details() or '', tls)}"

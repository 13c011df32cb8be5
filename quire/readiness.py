"""Asks processes on this machine whether they are ready, again and again until they are."""

import asyncio
import ssl

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.channel import CHANNEL_OPTIONS, open_channel
from protos.tls import ClientTls

_PAUSE_S = 0.1
_CALL_TIMEOUT_S = 2.0


async def until_grpc_serves(address: str, service: str, tls: ClientTls | None = None) -> None:
    """Returns when the server at ``address`` says through grpc.health.v1 that ``service`` is SERVING."""
    async with open_channel(address, CHANNEL_OPTIONS, tls) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        while True:
            try:
                answer = await health.Check(request, timeout=_CALL_TIMEOUT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass  # not there yet; the caller has the deadline, and sees a process that ends
            await asyncio.sleep(_PAUSE_S)


async def until_http_serves(url: str, tls: ClientTls | None = None) -> None:
    """Returns when GET ``url`` answers 200, over HTTPS with the certificate of ``tls``.

    Who answers is a process of ours, whatever names its certificate has: it is not checked.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls is not None and tls.certfile is not None:
        context.load_cert_chain(tls.certfile, tls.keyfile)
    async with httpx.AsyncClient(timeout=_CALL_TIMEOUT_S, trust_env=False, verify=context) as client:
        while True:
            try:
                if (await client.get(url)).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(_PAUSE_S)

"""TLS between processes, over real sockets: who is let in, and what is said to, or of, who is not."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from protos.channel import CHANNEL_OPTIONS, add_port, make_server, open_channel
from protos.tls import ClientTls, ServerTls, explain_failure
from tests.doubles.certificates import Authority
from tests.doubles.logged_process import ended, start, until_said
from tests.doubles.processes import free_port
from tests.integration.fake_worker import FakeWorker
from tests.integration.router_stack import Client


class Files:
    """Certificates by role, of one authority, and of another that nobody trusts."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.stranger = Authority(folder), Authority(folder, "stranger")
        self.ca = self.authority.certfile
        self.server = self.authority.issue("server")
        self.router = self.authority.issue("router", "DNS:router.quire", "IP:127.0.0.1")
        self.gateway = self.authority.issue("gateway", "DNS:gateway.quire")
        self.expired = self.authority.issue("expired", days=-1)
        self.strange = self.stranger.issue("gateway")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def serving(tls: ServerTls | None) -> AsyncIterator[str]:
    """A server of the health service; yields its address."""
    server, health = make_server(tls), health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    port = add_port(server, "127.0.0.1:0", tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def outcome(server: ServerTls | None, client: ClientTls | None) -> str:
    """``ok``, or the status of a call and what we say of it."""
    async with serving(server) as address, open_channel(address, CHANNEL_OPTIONS, client) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {explain_failure(error.details() or '', client)}"
        return "ok"


async def test_a_server_that_shows_a_certificate(files: Files) -> None:
    server = ServerTls(*files.server)
    assert await outcome(server, ClientTls(files.ca)) == "ok"
    assert await outcome(server, ClientTls(files.server[0])) == "ok", "a certificate may be trusted by itself"
    assert await outcome(server, ClientTls(files.ca, name="localhost")) == "ok"
    stranger = files.stranger.certfile
    wrong = await outcome(server, ClientTls(stranger))
    assert wrong.startswith(f"UNAVAILABLE: {stranger} does not vouch for its certificate")
    assert "its certificate is not for w.quire" in await outcome(server, ClientTls(files.ca, name="w.quire"))
    assert "it may want TLS" in await outcome(server, None)
    assert "it does not speak TLS" in await outcome(None, ClientTls(files.ca))
    assert "its certificate is expired" in await outcome(ServerTls(*files.expired), ClientTls(files.ca))


async def test_a_server_that_demands_one(files: Files) -> None:
    server = ServerTls(*files.server, files.ca)
    assert await outcome(server, ClientTls(files.ca, *files.gateway)) == "ok"
    assert "it may want a client's certificate" in await outcome(server, ClientTls(files.ca))
    assert "it may want TLS" in await outcome(server, None)
    for refused in (files.strange, files.expired):
        said = await outcome(server, ClientTls(files.ca, *refused))
        assert f"it may not accept the certificate {refused[0]}" in said


async def test_a_server_that_lets_one_role_in(files: Files) -> None:
    server = ServerTls(*files.server, files.ca, ("router.quire", "other.quire"))
    assert await outcome(server, ClientTls(files.ca, *files.router)) == "ok"
    said = await outcome(server, ClientTls(files.ca, *files.gateway))
    assert said.startswith("PERMISSION_DENIED: the client's certificate is for gateway.quire; --ssl-client-names wants")


# ---- whole processes ----


async def test_gateway_router_and_worker_each_with_a_certificate(files: Files, demo_model: Path) -> None:
    port, http_port = free_port(), free_port()
    at_worker = ServerTls(*files.server, files.ca, ("router.quire",))
    async with FakeWorker(tls=at_worker) as worker:
        router = await start(
            *("router", "--model", demo_model, "--port", port, "--worker-urls", worker.address),
            *("--served-model-name", "m"),
            *("--ssl-certfile", files.router[0], "--ssl-keyfile", files.router[1], "--ssl-ca-certs", files.ca),
            *("--ssl-client-names", "gateway.quire", "--worker-ssl-ca-certs", files.ca),
            *("--worker-ssl-certfile", files.router[0], "--worker-ssl-keyfile", files.router[1]),
        )  # fmt: skip
        gateway = await start(
            "gateway", "--port", http_port, "--router", f"127.0.0.1:{port}",
            *("--ssl-certfile", files.server[0], "--ssl-keyfile", files.server[1]),
            *("--router-ssl-ca-certs", files.ca, "--router-ssl-name", "router.quire"),
            *("--router-ssl-certfile", files.gateway[0], "--router-ssl-keyfile", files.gateway[1]),
        )  # fmt: skip
        async with ended(gateway, router):
            await until_said(router, "is ready")
            await until_said(gateway, "listening on")
            url = f"https://127.0.0.1:{http_port}/v1"
            async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=files.ca), trust_env=False) as client:
                body = {"model": "m", "prompt": "x", "max_tokens": 3}
                assert (await client.post(f"{url}/completions", json=body)).status_code == 200
            strange = ssl.create_default_context(cafile=files.stranger.certfile)
            async with httpx.AsyncClient(verify=strange, trust_env=False) as client:
                with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                    await client.get(f"{url}/models")
            tls = ClientTls(files.ca, *files.server)
            async with open_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS, tls) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await Client(None, "", channel).call().read()
                assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_their_logs_say_why_nobody_comes_together(files: Files, demo_model: Path) -> None:
    async with FakeWorker(tls=ServerTls(*files.server, files.ca)) as worker, serving(ServerTls(*files.server)) as other:
        flags = ("--model", demo_model, "--port", 0, "--worker-urls", worker.address)
        router = await start("router", *flags)
        http_port = free_port()
        stranger = files.stranger.certfile
        gateway = await start("gateway", "--port", http_port, "--router", other, "--router-ssl-ca-certs", stranger)
        async with ended(router, gateway):
            assert "it may want TLS" in await until_said(router, f"{worker.address}")
            await until_said(gateway, "listening on")
            async with httpx.AsyncClient(trust_env=False) as client:
                assert (await client.get(f"http://127.0.0.1:{http_port}/health")).status_code == 503
            said = await until_said(gateway, "does not answer")
            assert f"{stranger} does not vouch for its certificate" in said

"""Keys over gRPC: who is let in, to what, and which settings would not be enforced."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import quire.config
import quire.plan
import router.config
import router.server
from protos import inference_pb2, inference_pb2_grpc, registry_pb2, registry_pb2_grpc
from protos.api_keys import ApiKey, digest_of, key_metadata
from tests.doubles.logged_process import ended, start, until_said
from tests.doubles.processes import free_port
from tests.integration.fake_worker import FakeWorker
from tests.integration.router_stack import SERVING, Client, failure, running_router

KEYS = (
    ApiKey(digest_of("plain")),
    ApiKey(digest_of("team"), tenant="team", priority_ceiling=2),
)
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    async with FakeWorker(takes_priorities=True) as worker:
        yield worker


@pytest.fixture
async def client(demo_tokenizer: Any, worker: FakeWorker) -> AsyncIterator[Client]:
    settings = {"api_keys": KEYS, "own_key": digest_of("own"), "enable_worker_registration": True}
    async with running_router(demo_tokenizer, worker.address, **settings) as client, asyncio.timeout(20):
        while await client.health() != SERVING:
            await asyncio.sleep(0.01)
        yield client


def generate(client: Client, key: str | Sequence[tuple[str, str]], **fields: Any) -> Any:
    request = inference_pb2.GenerateRequest(model="demo", text="x", **fields)
    request.stopping.max_tokens = 2
    metadata = key_metadata(key) if isinstance(key, str) else key
    return inference_pb2_grpc.InferenceStub(client.channel).Generate(request, metadata=metadata, timeout=20)


async def read_all(call: Any) -> None:
    async for _ in call:
        pass


@pytest.mark.parametrize(
    "metadata",
    [
        (), (("authorization", ""),), (("authorization", "Bearer"),), (("authorization", "plain"),),
        (("authorization", "Basic plain"),), (("x-api-key", "plain"),), key_metadata("plainer"), key_metadata("plai"),
        key_metadata("x" * 5000),
    ],
    ids=lambda metadata: str(metadata)[:40],
)  # fmt: skip
async def test_calls_without_a_known_key(client: Client, metadata: tuple[tuple[str, str], ...]) -> None:
    refused = await failure(read_all(generate(client, metadata)))
    assert refused.code == UNAUTHENTICATED
    assert "authorization: Bearer KEY" in refused.message
    assert "plain" not in refused.message
    stub = inference_pb2_grpc.InferenceStub(client.channel)
    for method in ("Tokenize", "ListModels", "GetMetrics", "GetLoad", "Cancel", "Explain", "Detokenize", "GetModel"):
        request = getattr(inference_pb2, "GetModelRequest" if method == "GetModel" else f"{method}Request")()
        assert (await failure(getattr(stub, method)(request, metadata=metadata))).code == UNAUTHENTICATED, method


def test_every_method_is_asked_for_above() -> None:
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    assert {method.name for method in service.methods} == {
        *("Tokenize", "ListModels", "GetMetrics", "GetLoad", "Cancel", "Explain", "Detokenize", "GetModel", "Generate")
    }


async def test_known_keys_are_let_in(client: Client) -> None:
    for key in ("plain", "own"):
        await read_all(generate(client, key))
    await read_all(generate(client, (("authorization", "bearer plain"),)))


async def test_health_is_open_and_reflection_is_not(client: Client) -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    assert (await failure(read_all(reflection.ServerReflectionInfo(iter(requests))))).code == UNAUTHENTICATED
    await read_all(reflection.ServerReflectionInfo(iter(requests), metadata=key_metadata("plain")))


async def test_a_client_cannot_become_a_worker(client: Client) -> None:
    register = registry_pb2_grpc.RegistryStub(client.channel).Register
    request = registry_pb2.RegisterRequest(host="127.0.0.1", port=1)
    for metadata in ((), key_metadata("plain")):
        assert (await failure(register(request, metadata=metadata))).code == UNAUTHENTICATED
    await register(request, metadata=key_metadata("own"))


async def test_a_key_is_one_account_whatever_the_request_says(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    check = router.server.check_generate

    def noting(message: inference_pb2.GenerateRequest, *rest: Any) -> Any:
        seen.append((message.tenant, message.priority))
        return check(message, *rest)

    monkeypatch.setattr("router.server.check_generate", noting)
    await read_all(generate(client, "team", tenant="other/user"))
    await read_all(generate(client, "team", priority=5))
    await read_all(generate(client, "plain"))
    await read_all(generate(client, "own", tenant="other/user", priority=-3))
    plain = digest_of("plain")[:8].hex()
    assert seen == [("team/other/user", 2), ("team", 5), (plain, 0), ("other/user", -3)]
    refused = await failure(read_all(generate(client, "team", priority=1)))
    assert (refused.code, refused.field) == (grpc.StatusCode.INVALID_ARGUMENT, "priority")


async def test_a_key_cannot_cancel_what_another_one_runs(client: Client, worker: FakeWorker) -> None:
    worker.gate.clear()
    call = generate(client, "team", request_id="theirs")
    await call.read()
    cancel = inference_pb2_grpc.InferenceStub(client.channel).Cancel
    request = inference_pb2.CancelRequest(request_ids=["theirs"])
    outcomes = [(await cancel(request, metadata=key_metadata(key))).results[0].outcome for key in ("plain", "team")]
    assert outcomes == [
        inference_pb2.CancelResponse.OUTCOME_NOT_FOUND, inference_pb2.CancelResponse.OUTCOME_CANCELLED,
    ]  # fmt: skip
    worker.gate.set()


# ---- settings ----


def keys_file(folder: Path, **fields: object) -> str:
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": [{"sha256": digest_of("secret").hex(), **fields}]}))
    return str(path)


@pytest.mark.parametrize(
    "fields",
    [{"requests_per_minute": 1}, {"tokens_per_minute": 1}, {"max_concurrent_requests": 1}, {"output_policy": {}}],
    ids=str,
)
def test_what_would_not_be_enforced_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    flags = ["--model", "/dev/null", "--worker-urls", "a:1", "--api-keys-file"]
    with pytest.raises(router.config.ConfigError, match=f"has {next(iter(fields))}, which gateways enforce"):
        router.config.parse_args([*flags, keys_file(tmp_path, **fields)])
    config = router.config.parse_args([*flags, keys_file(tmp_path, tenant="t", priority_ceiling=1)])
    assert [key.tenant for key in config.api_keys] == ["t"]


def test_registration_with_keys_wants_a_key_of_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model", "/dev/null", "--enable-worker-registration", "--api-key", "a"]
    with pytest.raises(router.config.ConfigError, match="QUIRE_ROUTER_API_KEY"):
        router.config.parse_args(flags)
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY", "own")
    assert router.config.parse_args(flags).own_key == digest_of("own")
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY", "o w n")
    with pytest.raises(router.config.ConfigError, match="QUIRE_ROUTER_API_KEY must be letters"):
        router.config.parse_args(flags)


def test_the_key_of_the_processes_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model", "/dev/null", "--worker-urls", "a:1"]
    secret = tmp_path / "secret"
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY_FILE", str(secret))
    with pytest.raises(router.config.ConfigError, match=r"cannot read .*secret: No such file"):
        router.config.parse_args(flags)
    secret.write_text("own\n")
    assert router.config.parse_args(flags).own_key == digest_of("own")
    plan = quire.plan.make_plan(
        quire.config.parse_args(["--port", "0", "--grpc-port", "0", "--api-key", "a"]), Path("/dev/null"),
        {"QUIRE_ROUTER_API_KEY_FILE": str(secret)},
    )  # fmt: skip
    assert "QUIRE_ROUTER_API_KEY" not in plan.router.environment
    for text in ("", "o w n"):
        secret.write_text(text)
        with pytest.raises(router.config.ConfigError, match="secret, which QUIRE_ROUTER_API_KEY_FILE names, must be"):
            router.config.parse_args(flags)
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY", "own")
    with pytest.raises(router.config.ConfigError, match="are both set"):
        router.config.parse_args(flags)


def test_quire_serve_asks_for_keys_at_both_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = ["--port", "0", "--grpc-port", "0"]

    def plan(*flags: str) -> quire.plan.Plan:
        return quire.plan.make_plan(quire.config.parse_args([*ports, *flags]), Path("/dev/null"), {})

    def keys_of(router_process: quire.plan.ProcessPlan) -> set[bytes]:
        return {key.sha256 for key in router.config.parse_args([*router_process.args]).api_keys}

    both = plan("--api-keys-file", keys_file(tmp_path), "--api-key", "b")
    assert keys_of(both.router) == {digest_of("secret"), digest_of("b")}
    own = both.router.environment["QUIRE_ROUTER_API_KEY"]
    assert own == both.gateway.environment["QUIRE_ROUTER_API_KEY"]
    assert len(own) > 30
    assert own not in " ".join((*both.router.args, *both.gateway.args))
    assert "QUIRE_ROUTER_API_KEY" not in both.workers[0].environment
    # Keys with limits would escape them over gRPC, so there they are none.
    limited = plan("--api-keys-file", keys_file(tmp_path, requests_per_minute=1))
    assert keys_of(limited.router) == set()
    assert limited.router.environment["QUIRE_ROUTER_API_KEY"]
    assert "QUIRE_ROUTER_API_KEY" not in plan().router.environment


async def test_a_gateway_shows_its_own_key(demo_model: Path) -> None:
    port, first, second = free_port(), free_port(), free_port()
    own = {"QUIRE_ROUTER_API_KEY": "own"}
    async with FakeWorker() as worker:
        asked = await start(
            *("router", "--model", demo_model, "--port", port, "--worker-urls", worker.address),
            *("--served-model-name", "m"), QUIRE_API_KEY="of-clients", **own,
        )  # fmt: skip
        knows = await start("gateway", "--port", first, "--router", f"127.0.0.1:{port}", **own)
        lacks = await start("gateway", "--port", second, "--router", f"127.0.0.1:{port}")
        async with ended(asked, knows, lacks), httpx.AsyncClient(trust_env=False) as client:
            await asyncio.gather(
                until_said(asked, "is ready"), until_said(knows, "listening on"), until_said(lacks, "listening on")
            )
            body = {"model": "m", "prompt": "x", "max_tokens": 3}
            replies = [
                await client.post(f"http://127.0.0.1:{at}/v1/completions", json=body, timeout=20)
                for at in (first, second)
            ]
            assert [reply.status_code for reply in replies] == [200, 500]
            assert "UNAUTHENTICATED: an API key is needed" in await until_said(lacks, "UNAUTHENTICATED")
            assert (await client.get(f"http://127.0.0.1:{first}/v1/models")).status_code == 200

"""Workers that come and go: names whose addresses change, workers that register, workers that shut down."""

import asyncio

import grpc
import pytest

import router.discovery
from protos import inference_pb2, registry_pb2, registry_pb2_grpc, sampling_pb2
from router.discovery import Discovery, join, peer_host
from router.events import RouterEvents
from router.fleet import Fleet
from router.recovery import Recovery
from tests.integration.fake_worker import FakeWorker, count_up
from tests.integration.router_stack import failure, running_router
from worker.config import WorkerConfig
from worker.registration import Registration

IDS = inference_pb2.OutputOptions(token_ids=True)


def up_to(max_tokens: int) -> sampling_pb2.StopConditions:
    return sampling_pb2.StopConditions(max_tokens=max_tokens)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses that names have; a name without an entry cannot be looked up."""
    known: dict[str, list[str]] = {}

    async def lookup(name: str) -> list[str]:
        if name not in known:
            raise OSError("no such name")
        return known[name]

    monkeypatch.setattr(router.discovery, "lookup", lookup)
    monkeypatch.setattr(router.discovery, "LOOKUP_INTERVAL_S", 0.02)
    return known


async def test_workers_of_a_name_come_and_go(demo_tokenizer, names):
    name = "dns:///workers:50061"
    async with (
        FakeWorker(worker_id="a") as a,
        FakeWorker(worker_id="b") as b,
        running_router(demo_tokenizer, name) as client,
    ):
        assert (await client.model()).ready_workers == 0
        names[name] = [a.address]
        await client.until_ready(1)
        names[name] = [a.address, b.address]
        await client.until_ready(2)
        b.gate.clear()
        while not b.submits:  # one of these goes to b and stays there
            calls = [client.call(stopping=up_to(3), output=IDS) for _ in range(3)]
            await asyncio.sleep(0.05)
        names[name] = [a.address]
        await client.until_ready(1)
        await asyncio.sleep(0.1)
        assert len((await client.explain()).candidates) == 2, "it still runs something"
        count = len(b.submits)
        await client.generate(stopping=up_to(2))
        assert len(b.submits) == count, "it gets nothing new"
        b.gate.set()
        await client.until_explained(lambda explained: len(explained.candidates) == 1)
        for call in calls:
            assert [event async for event in call][-1].HasField("finished"), "what it ran came to its end"
        del names[name]  # the name server is away: the workers are not
        await asyncio.sleep(0.1)
        assert (await client.model()).ready_workers == 1


async def test_an_address_that_comes_back_keeps_its_link(demo_tokenizer, names):
    name = "dns:///workers:50061"
    async with FakeWorker() as worker:
        names[name] = [worker.address]
        async with running_router(demo_tokenizer, name) as client:
            await client.until_ready(1)
            worker.gate.clear()
            call = asyncio.create_task(client.generate(stopping=up_to(3), output=IDS))
            await worker.until(lambda: len(worker.submits) == 1)
            names[name] = []
            await client.until_ready(0)
            names[name] = [worker.address]
            await client.until_ready(1)
            worker.gate.set()
            prompt = demo_tokenizer.encode_text("Once upon a time")
            assert (await call).ids() == [count_up(prompt, index) for index in range(3)]
            assert len(worker.streams) == 1


async def test_a_worker_registers_and_leaves(demo_tokenizer, monkeypatch):
    monkeypatch.setattr(router.discovery, "LEASE_S", 0.3)
    async with FakeWorker() as worker, running_router(demo_tokenizer, enable_worker_registration=True) as client:
        registration = Registration(client.address, "", worker.port)  # the host is whence it calls
        registration.start()
        await client.until_ready(1)
        assert (await client.generate(stopping=up_to(2))).finished
        await registration.leave()
        await client.until_ready(0)
        stub = registry_pb2_grpc.RegistryStub(client.channel)
        await stub.Register(registry_pb2.RegisterRequest(host="127.0.0.1", port=worker.port))
        await client.until_ready(1)
        await client.until_ready(0)  # it does not renew its registration
        failed = await failure(stub.Register(registry_pb2.RegisterRequest(port=70000)))
        assert (failed.code, failed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "port")


@pytest.mark.parametrize("host", ["h" * 254, "h" * 100_000, "here\nINFO router: forged", "a b", "ä.example", "a/b"])
async def test_hosts_that_register_must_be_hosts(demo_tokenizer, caplog, host):
    async with running_router(demo_tokenizer, enable_worker_registration=True) as client:
        stub = registry_pb2_grpc.RegistryStub(client.channel)
        failed = await failure(stub.Register(registry_pb2.RegisterRequest(host=host, port=50051)))
        assert (failed.code, failed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "host")
        assert len(failed.message) < 200
        assert not client.router._fleet.links
        for right in ("worker-1.example", "::1", "[::1]", "10.0.0.7", "worker_2"):
            await stub.Register(registry_pb2.RegisterRequest(host=right, port=50051, leaving=True))
    assert not any(host in line for line in caplog.messages)


async def test_nobody_registers_where_that_is_not_wanted(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        stub = registry_pb2_grpc.RegistryStub(client.channel)
        failed = await failure(stub.Register(registry_pb2.RegisterRequest(port=worker.port)))
        assert failed.code == grpc.StatusCode.UNIMPLEMENTED


async def test_a_worker_that_shuts_down_gets_nothing_new_and_ends_what_it_has(demo_tokenizer):
    async with (
        FakeWorker(worker_id="old", max_slots=8) as old,
        FakeWorker(worker_id="new") as new,
        running_router(demo_tokenizer, old, new, policy="round_robin") as client,
    ):
        old.gate.clear()
        calls = [asyncio.create_task(client.generate(stopping=up_to(4))) for _ in range(2)]
        await old.until(lambda: len(old.submits) == 1)
        old.pong = {"draining": True}
        await client.until_ready(1)
        for _ in range(3):
            await client.generate(stopping=up_to(2))
        assert len(old.submits) == 1
        old.gate.set()
        assert all(answer.finished for answer in await asyncio.gather(*calls))
        assert not old.cancels
        assert len(new.submits) == 4


def test_addresses_are_read_and_written_with_their_brackets():
    assert join("10.0.0.7", 50061) == "10.0.0.7:50061"
    assert join("::1", 50061) == "[::1]:50061"
    assert peer_host("ipv4:10.0.0.7:4242") == "10.0.0.7"
    assert peer_host("ipv6:%5B::1%5D:4242") == "::1"
    assert peer_host("unix:/run/quire.sock") == ""


async def test_a_name_is_looked_up_for_all_its_addresses():
    assert "127.0.0.1:7" in await router.discovery.lookup("dns:///localhost:7")


def test_what_is_advertised():
    def advertised(**settings) -> tuple[str, int]:
        return WorkerConfig(model=None, register="router:50051", **settings).advertised

    assert advertised(host="10.0.0.7") == ("10.0.0.7", 0)
    assert advertised(host="0.0.0.0") == ("", 0)
    assert advertised(host="0.0.0.0", advertise="gpu7.example:50070") == ("gpu7.example", 50070)


async def test_sources_are_united():
    fleet = Fleet(0, 1.0)
    fleet.start(Deaf(), Recovery(3, lambda choice: None, lambda: None, RouterEvents()))
    fleet.set_addresses("given", ["127.0.0.1:1", "127.0.0.1:2"])
    fleet.set_addresses("registered", ["127.0.0.1:2", "127.0.0.1:3"])
    assert [link.address for link in fleet.links] == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
    fleet.set_addresses("registered", [])
    assert [link.address for link in fleet.links if not link.retired] == ["127.0.0.1:1", "127.0.0.1:2"]
    await fleet.stop()


class Deaf:
    """A listener that does nothing."""

    def readiness_changed(self) -> None: ...
    def capacity_changed(self) -> None: ...


async def test_given_addresses_need_no_lookup():
    reports = []
    discovery = Discovery(["a:1", "b:2"], lambda source, addresses: reports.append((source, list(addresses))))
    discovery.start()
    assert reports == [("given", ["a:1", "b:2"])]
    await discovery.stop()

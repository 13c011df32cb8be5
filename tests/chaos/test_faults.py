"""The short tier: each kind of harm to real processes under load, of which a client may notice a pause at most."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from tests.chaos.cluster import Cluster
from tests.chaos.history import Order, faults_at_rest, faults_in
from tests.chaos.load import Load, ask
from tests.chaos.nemesis import FLEET_FAULTS, Nemesis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@contextlib.asynccontextmanager
async def cluster(model: Path, folder: Path, workers: int = 3, step_s: float = 0.02) -> AsyncIterator[Cluster]:
    """Processes that are at rest when the test is over; their log is shown when they are not."""
    with (folder / "log").open("w+") as log:
        async with Cluster(model, workers, log, step_s) as running:
            yield running
            assert faults_at_rest(await running.at_rest()) == []
            assert await running.router_at_rest() == []
        log.seek(0)
        lines = log.readlines()
    assert [line for line in lines if "Traceback" in line or "never retrieved" in line] == []


@pytest.mark.parametrize(
    ("faults", "count", "seed"),
    [(("kill",), 8, 1), (("pause",), 2, 2), (("cut", "delay", "end", "kill"), 10, 3), (FLEET_FAULTS, 8, 5)],
    ids=["killed", "stopped", "mixed", "all at once"],
)
async def test_streams_outlive_their_workers(
    demo_model: Path, tmp_path: Path, faults: tuple[str, ...], count: int, seed: int
) -> None:
    async with cluster(demo_model, tmp_path) as running:
        calm = False
        load = Load(running.stub, streams=32, seed=seed, enough=lambda load: calm)
        clients = asyncio.create_task(load.run())
        nemesis = Nemesis(running, seed, load.progress, faults)
        await nemesis.run(lambda nemesis: nemesis.done.total() >= count)
        calm = True
        await clients
        assert load.faults == []
        assert load.done > 50
        assert load.moved_with_shape > 0, "some followed grammars on two workers"


async def test_rolling_restart_fails_no_request(demo_model: Path, tmp_path: Path) -> None:
    async with cluster(demo_model, tmp_path) as running:
        load = Load(running.stub, streams=32, seed=4, enough=lambda load: load.sent >= 1000, max_tokens=30)
        clients = asyncio.create_task(load.run())
        for worker in running.workers:
            await asyncio.sleep(1)
            assert await worker.end() == 0
            worker.start()
            await running.until_ready(3)
        restarted_at = load.done
        await clients
        assert load.faults == []
        assert load.done == 1000
        assert restarted_at < 1000, "all restarts were under load"


async def test_a_stopped_worker_is_noticed_before_it_counts_as_lost(demo_model: Path, tmp_path: Path) -> None:
    async with cluster(demo_model, tmp_path, workers=2) as running:
        stopped = running.workers[0]
        stopped.pause()
        await asyncio.sleep(1.5)
        # It counts as lost after five seconds; what was sent to it meanwhile would take longer than that.
        orders = [Order(f"r{number}", (1000, 1000 + number), 20, None, 1) for number in range(12)]
        async with asyncio.timeout(4):
            seen = await asyncio.gather(*(ask(running.stub, order) for order in orders))
        assert [fault for one in seen for fault in faults_in(one)] == []
        stopped.resume()
        await running.until_ready(2)


async def test_clients_that_hang_up_leave_nothing_behind(demo_model: Path, tmp_path: Path) -> None:
    async with cluster(demo_model, tmp_path, workers=1) as running:

        async def hang_up(number: int) -> None:
            order = Order(f"r{number}", tuple(range(1000, 1010 + number)), 400, None, 1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05 + 0.01 * number):
                    await ask(running.stub, order)

        for _ in range(3):
            await asyncio.gather(*(hang_up(number) for number in range(40)))


async def test_a_worker_outlives_routers_that_hang_up(demo_model: Path, tmp_path: Path) -> None:
    async with cluster(demo_model, tmp_path, workers=1) as running:
        worker = running.workers[0]

        async def hang_up(after_hello: bool) -> None:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
                call = worker_pb2_grpc.WorkerStub(channel).Connect()
                await call.write(worker_pb2.RouterMessage(ping=worker_pb2.Ping()))
                if after_hello:
                    await call.read()
                call.cancel()

        for turn in range(40):
            await asyncio.gather(*(hang_up(bool(turn % 2)) for _ in range(5)))
        assert worker.status is None

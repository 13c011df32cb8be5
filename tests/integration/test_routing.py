"""Routing by prefix over real sockets: what workers tell, what the router makes of it, and what clients are told."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import httpx
import pytest

from protos import inference_pb2, sampling_pb2, worker_pb2
from protos.prefix import block_hashes
from router.request import pack_ids
from tests.doubles.tiny_model import save_tiny
from tests.integration.fake_worker import FakeWorker
from tests.integration.router_stack import failure, running_router
from tests.integration.test_worker_process import free_port, start

PROMPT = list(range(100, 420))
CACHING = {"enable_prefix_caching": True, "num_blocks": 1000}


def up_to(max_tokens: int) -> sampling_pb2.StopConditions:
    return sampling_pb2.StopConditions(max_tokens=max_tokens)


def ids(*token_ids: int) -> inference_pb2.TokenIds:
    return inference_pb2.TokenIds(ids=token_ids)


def greedy() -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=0.0)


async def started(call) -> inference_pb2.Started:
    """What a call begins with."""
    event = await call.read()
    assert event.WhichOneof("event") == "started"
    return event.started


async def route_at_end(call) -> dict[str, str]:
    """What a call's metadata says of its route once it has ended."""
    async for _ in call:
        pass
    return {key: value for key, value in await call.trailing_metadata() or () if key.startswith("x-quire-")}


async def explain(client, prompt: list[int]) -> inference_pb2.ExplainResponse:
    return await client.stub.Explain(inference_pb2.ExplainRequest(model="demo", token_ids=ids(*prompt)))


async def until(condition) -> None:
    """Waits until a coroutine function returns something true."""
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


# ---- real workers ----


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing") / "tiny-llama"
    save_tiny(folder, vocab_size=49152, max_position_embeddings=1024)
    return folder


@asynccontextmanager
async def worker(model, port: int):
    """A worker process."""
    process = await start(
        "--model", str(model), "--port", str(port), "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 22),
        "--log-level", "error", "--worker-id", f"worker-{port}",
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_repeated_prefix_goes_to_the_worker_that_has_it_until_that_one_restarts(model, demo_tokenizer):
    ports = [free_port(), free_port()]
    async with AsyncExitStack() as stack:
        processes = {f"worker-{port}": (port, await stack.enter_async_context(worker(model, port))) for port in ports}
        client = await stack.enter_async_context(
            running_router(demo_tokenizer, *(f"127.0.0.1:{port}" for port in ports))
        )
        await until(lambda: _ready(client, 2))

        async def run(prompt: list[int]) -> dict[str, str]:
            call = client.call(token_ids=ids(*prompt), stopping=up_to(2), sampling=greedy())
            return await route_at_end(call)

        first = await run(PROMPT)
        holder = first["x-quire-worker"]
        assert (first["x-quire-cached-tokens"], first["x-quire-predicted-cached-tokens"]) == ("0", "0")
        for turn in range(4):
            again = await run([*PROMPT, 7 + turn])
            assert again["x-quire-worker"] == holder
            assert again["x-quire-reason"] == "prefix"
            assert again["x-quire-cached-tokens"] == again["x-quire-predicted-cached-tokens"] == "320"
        # Others go elsewhere now and then, so the holder is no favourite by itself.
        others = {(await run([number] * 100))["x-quire-worker"] for number in range(200, 212)}
        assert len(others) == 2
        assert {c.index_state for c in (await explain(client, PROMPT)).candidates} == {"exact"}

        port, process = processes[holder]
        process.kill()
        await process.wait()
        await until(lambda: _ready(client, 1))
        assert max(c.cached_tokens for c in (await explain(client, PROMPT)).candidates) < 320
        await stack.enter_async_context(worker(model, port))
        await until(lambda: _ready(client, 2))
        explained = await explain(client, PROMPT)
        assert {c.cached_tokens for c in explained.candidates} == {0}
        assert (await run(PROMPT))["x-quire-cached-tokens"] == "0"


async def _ready(client, count: int) -> bool:
    return (await client.model()).ready_workers == count


# ---- scripted workers ----


async def test_a_gap_in_the_events_is_answered_by_a_new_snapshot(demo_tokenizer):
    names = block_hashes(pack_ids(PROMPT), 16)
    async with FakeWorker(**CACHING) as fake, running_router(demo_tokenizer, fake) as client:
        await fake.until(lambda: fake.subscriptions == 1)

        def tell(sequence: int, **fields) -> None:
            fake.stream.send(kv_events=worker_pb2.KvEvents(epoch=fake.hello["epoch"], sequence=sequence, **fields))

        async def known(tokens: int, state: str) -> None:
            async def seen() -> bool:
                (candidate,) = (await explain(client, PROMPT)).candidates
                return (candidate.cached_tokens, candidate.index_state) == (tokens, state)

            await until(seen)

        await known(0, "approximate")
        tell(1, snapshot=True, cleared=True, stored=b"".join(names[:10]))
        await known(160, "exact")
        tell(2, removed=names[9])
        await known(144, "exact")
        tell(4, stored=names[9])
        await fake.until(lambda: fake.subscriptions == 2)
        await known(144, "degraded")
        tell(5, snapshot=True, cleared=True, stored=b"".join(names[:12]))
        await known(192, "exact")


async def test_a_worker_without_prefix_cache_is_not_asked_about_it(demo_tokenizer):
    async with FakeWorker() as fake, running_router(demo_tokenizer, fake) as client:
        for _ in range(2):
            await client.generate(token_ids=ids(*PROMPT), stopping=up_to(1))
        assert (await explain(client, PROMPT)).candidates[0].cached_tokens == 0
        assert fake.subscriptions == 0


async def test_explain_scores_every_worker_and_changes_nothing(demo_tokenizer):
    async with (
        FakeWorker(worker_id="a", **CACHING) as a,
        FakeWorker(worker_id="b", **CACHING) as b,
        running_router(demo_tokenizer, a, b, "127.0.0.1:1") as client,
    ):
        names = block_hashes(pack_ids(PROMPT), 16)
        for fake, known in ((a, names), (b, names[:5])):
            await fake.until(lambda fake=fake: fake.subscriptions == 1)
            events = {"sequence": 1, "snapshot": True, "cleared": True, "stored": b"".join(known)}
            fake.stream.send(kv_events=worker_pb2.KvEvents(epoch=fake.hello["epoch"], **events))

        async def both_known() -> bool:
            return sorted(c.index_state for c in (await explain(client, PROMPT)).candidates) == ["", "exact", "exact"]

        await until(both_known)
        explained = await explain(client, PROMPT)
        by_name = {candidate.worker: candidate for candidate in explained.candidates}
        assert explained.chosen == "a"
        assert (by_name["a"].cached_tokens, by_name["b"].cached_tokens) == (19 * 16, 80), "one token is left to compute"
        for candidate in (by_name["a"], by_name["b"]):
            parts = candidate.wait_s + candidate.work_s + candidate.decode_s + candidate.memory_s
            assert candidate.score == pytest.approx(parts)
        assert by_name["a"].score < by_name["b"].score
        assert not by_name["127.0.0.1:1"].ready
        assert explained == await explain(client, PROMPT)


async def test_the_route_is_told_when_it_begins_and_with_the_status(demo_tokenizer):
    async with FakeWorker(worker_id="wörker", **CACHING) as fake, running_router(demo_tokenizer, fake) as client:
        call = client.call(stopping=up_to(3))
        route = (await started(call)).route
        assert (route.worker, route.reason, route.cached_tokens) == ("w?rker", "only", 3)
        last = await route_at_end(call)
        assert int(last.pop("x-quire-prefill-ms")) >= 0
        assert last == {
            "x-quire-worker": "w?rker", "x-quire-reason": "only", "x-quire-predicted-cached-tokens": "0",
            "x-quire-cached-tokens": "3", "x-quire-queue-ms": str(route.queue_ms), "x-quire-moves": "0",
        }  # fmt: skip


async def test_a_request_that_moved_names_the_worker_that_ended_it(demo_tokenizer):
    fakes = {name: FakeWorker(worker_id=name) for name in ("a", "b")}
    async with fakes["a"], fakes["b"], running_router(demo_tokenizer, *fakes.values()) as client:
        for fake in fakes.values():
            fake.gate.clear()
        call = client.call(stopping=up_to(6))
        name = (await started(call)).route.worker
        fakes[name].dies_at = 3
        for fake in fakes.values():
            fake.gate.set()
        last = await route_at_end(call)
        (other,) = fakes.keys() - {name}
        assert (last["x-quire-worker"], last["x-quire-moves"]) == (other, "1")


async def test_tenants_take_turns_at_a_worker(demo_tokenizer):
    async with FakeWorker(max_slots=1) as fake, running_router(demo_tokenizer, fake) as client:
        fake.gate.clear()
        tasks = []
        for number, tenant in enumerate(["greedy"] * 5 + ["modest"]):
            call = client.generate(request_id=f"{tenant}{number}", tenant=tenant, stopping=up_to(5))
            tasks.append(asyncio.create_task(call))
            await client.until_explained(lambda explained, number=number: explained.queued == number)
        fake.gate.set()
        await asyncio.gather(*tasks)
        order = [submit.request_id for submit in fake.submits]
        assert order.index("modest5") <= 2, "one runs already, and one may be equal"


async def test_a_full_queue_drops_the_lowest_class_for_a_higher_one(demo_tokenizer):
    async with (
        FakeWorker(max_slots=1, takes_priorities=True) as fake,
        running_router(demo_tokenizer, fake, max_num_queued_reqs=2) as client,
    ):
        fake.gate.clear()
        running = client.call(stopping=up_to(1))
        await client.until_running(1)
        low = [asyncio.create_task(failure(client.generate(priority=5, stopping=up_to(1)))) for _ in range(2)]

        async def both_wait() -> bool:
            return (await explain(client, PROMPT)).queued == 2  # ids, as there is no place for a text

        await until(both_wait)
        assert (await failure(client.generate(priority=5))).code == grpc.StatusCode.RESOURCE_EXHAUSTED
        urgent = asyncio.create_task(client.generate(priority=1, stopping=up_to(1)))
        done, _ = await asyncio.wait(low, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        (dropped,) = done
        assert dropped.result().code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dropped.result().retry_s >= 1
        fake.gate.set()
        assert (await urgent).finished
        running.cancel()
        for task in low:
            task.cancel()


async def test_a_deadline_that_no_worker_can_meet_reaches_none(demo_tokenizer):
    async with FakeWorker(**CACHING) as fake, running_router(demo_tokenizer, fake) as client:
        for step, tokens in ((1, 0), (2, 500)):
            load = worker_pb2.Load(prefill_tokens=tokens, busy_us=step * 50_000_000, free_blocks=1000)
            fake.stream.send(step_batch=worker_pb2.StepBatch(step=step, load=load))
        await client.until_explained(lambda explained: explained.candidates[0].work_s > 0.05)
        failed = await failure(client.call(timeout=10, token_ids=ids(*PROMPT)).read())
        assert failed.code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no worker can begin" in failed.message
        assert not fake.submits


async def test_metrics_show_how_well_the_router_foretells(demo_tokenizer):
    async with FakeWorker(**CACHING) as fake, running_router(demo_tokenizer, fake) as client:
        port = free_port()
        stop = client.router.collector.serve("127.0.0.1", port)
        try:
            for _ in range(2):  # the worker says each time that it had three tokens cached
                await client.generate(token_ids=ids(*PROMPT), stopping=up_to(1))
            async with httpx.AsyncClient() as http:
                text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
        finally:
            await asyncio.to_thread(stop)
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert {name: float(value) for name, value in samples.items() if "cached_tokens_total" in name} == {
            "quire_router_predicted_cached_tokens_total": 304,
            "quire_router_cached_tokens_total": 6,
            "quire_router_missed_cached_tokens_total": 301,
            "quire_router_unexpected_cached_tokens_total": 3,
        }
        assert float(samples["quire_router_sequences_total"]) == 2
        assert float(samples[f'quire_worker_ready{{worker="{fake.address}"}}']) == 1


TIMED = {"start_seconds": {"KV cache": 0.5, "weights": 2.0}}


async def test_the_load_of_each_worker_is_told(demo_tokenizer):
    async with FakeWorker(**CACHING, **TIMED) as fake, running_router(demo_tokenizer, fake, "127.0.0.1:1") as client:
        fake.pong = {
            "load": worker_pb2.Load(running=3, waiting=2, free_blocks=500, cached_blocks=200, num_preemptions=7)
        }
        await client.generate(token_ids=ids(*PROMPT), stopping=up_to(1))
        async with asyncio.timeout(10):
            while not (load := await client.stub.GetLoad(inference_pb2.GetLoadRequest())).workers[0].preemptions:
                await asyncio.sleep(0.01)
        worker, away = load.workers
        assert (worker.address, worker.name, worker.ready) == (fake.address, "fake", True)
        assert (worker.running, worker.waiting, worker.slots_taken, worker.max_slots) == (3, 2, 0, 4)
        assert (worker.used_blocks, worker.cached_blocks, worker.free_blocks) == (300, 200, 500)
        assert worker.total_blocks == 1000
        assert (worker.prefix_cache_queries, worker.prefix_cache_hits) == (len(PROMPT), 3)
        assert load.predictions.sequences == 1
        assert load.predictions.unexpected_tokens == 3
        assert (away.address, away.name, away.ready, away.max_slots) == ("127.0.0.1:1", "127.0.0.1:1", False, 0)
        text = (await client.stub.GetMetrics(inference_pb2.GetMetricsRequest())).text.decode()
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        label = f'{{worker="{fake.address}"}}'
        assert float(samples[f"quire_worker_kv_cache_usage_perc{label}"]) == 0.3
        assert float(samples[f"quire_worker_num_requests_running{label}"]) == 3
        assert float(samples[f"quire_worker_prefix_cache_hits_total{label}"]) == 3
        label = f'worker="{fake.address}"'
        assert float(samples[f'quire_worker_start_seconds{{phase="KV cache",{label}}}']) == 0.5
        assert float(samples[f'quire_worker_start_seconds{{phase="weights",{label}}}']) == 2.0
        # A worker that is away is not there, and has no figures.
        assert {line.split()[0] for line in samples if '127.0.0.1:1"' in line} == {
            'quire_worker_ready{worker="127.0.0.1:1"}'
        }


async def test_the_load_tells_who_waits(demo_tokenizer):
    async with FakeWorker(max_slots=1) as fake, running_router(demo_tokenizer, fake) as client:
        fake.gate.clear()
        calls = [asyncio.create_task(client.generate(token_ids=ids(1), stopping=up_to(1))) for _ in range(3)]
        async with asyncio.timeout(10):
            while (load := await client.stub.GetLoad(inference_pb2.GetLoadRequest())).waiting != 2:
                await asyncio.sleep(0.01)
        assert load.workers[0].slots_taken == 1
        fake.gate.set()
        await asyncio.gather(*calls)
        load = await client.stub.GetLoad(inference_pb2.GetLoadRequest())
        assert (load.waiting, load.workers[0].slots_taken) == (0, 0)

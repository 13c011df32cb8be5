"""Whoever goes away frees its blocks with the next step: the real worker service behind the real router."""

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from protos import inference_pb2, sampling_pb2, worker_pb2_grpc
from protos.channel import SERVER_OPTIONS
from tests.chaos.scripted_engine import loader
from tests.integration.router_stack import Client, failure, running_router
from worker.block_pool import BlockPool
from worker.config import WorkerConfig
from worker.grammar import GrammarCompiler
from worker.server import WorkerServicer

STEP_S = 0.02
# A step of the worker's, and 50 ms on the way.
BOUND_S = STEP_S + 0.05
CANCELLED = inference_pb2.CancelResponse.OUTCOME_CANCELLED


@asynccontextmanager
async def scripted(tokenizer) -> AsyncIterator[tuple[Client, BlockPool]]:
    """A client, and the pool of the one worker."""
    built = loader(STEP_S)(WorkerConfig(Path("scripted")))
    engine, limits, vocabulary = built
    servicer = WorkerServicer("scripted")
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    servicer.start(engine, limits, GrammarCompiler(vocabulary, limits.vocab_size))
    try:
        async with running_router(tokenizer, f"127.0.0.1:{port}") as client:
            await client.until_ready()
            yield client, engine.scheduler.pool
    finally:
        await servicer.drain(0)
        await server.stop(0)


def story(**fields):
    stopping = sampling_pb2.StopConditions(max_tokens=900, ignore_eos=True)
    sampling = sampling_pb2.SamplingParams(temperature=0)
    return {"stopping": stopping, "sampling": sampling, "output": inference_pb2.OutputOptions(token_ids=True), **fields}


async def some_tokens(call, count: int) -> None:
    seen = 0
    while seen < count:
        seen += len((await call.read()).delta.token_ids)


async def seconds_until_free(pool: BlockPool, since: float) -> float:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(5):
        while pool.num_available < pool.num_blocks:
            await asyncio.sleep(0.002)
    return loop.time() - since


@pytest.mark.parametrize("way", ["hangs up", "Cancel", "deadline"])
async def test_blocks_are_free_one_step_later(demo_tokenizer, way):
    loop = asyncio.get_running_loop()
    times = []
    async with scripted(demo_tokenizer) as (client, pool):
        for number in range(12):
            request_id = f"r{number}"
            call = client.call(timeout=0.3 if way == "deadline" else 30, **story(request_id=request_id))
            await some_tokens(call, 5)
            assert pool.num_available < pool.num_blocks
            if way == "hangs up":
                call.cancel()
                since = loop.time()
            elif way == "Cancel":
                since = loop.time()
                reply = await client.stub.Cancel(inference_pb2.CancelRequest(request_ids=[request_id]))
                assert reply.results[0].outcome == CANCELLED
                assert reply.results[0].usage.completion_tokens >= 5
                assert (await failure(some_tokens(call, 900))).code == grpc.StatusCode.CANCELLED
            else:
                assert (await failure(some_tokens(call, 900))).code == grpc.StatusCode.DEADLINE_EXCEEDED
                since = loop.time()
            times.append(await seconds_until_free(pool, since))
    assert statistics.median(times) <= BOUND_S

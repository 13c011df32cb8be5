"""What the router counts of what happens to requests and workers, as Prometheus reads it."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from protos import inference_pb2, sampling_pb2
from tests.integration.fake_worker import FakeWorker
from tests.integration.router_stack import Client, failure, running_router


async def counted(client: Client) -> dict[str, float]:
    """All samples of the router's own, by name and label."""
    text = (await client.stub.GetMetrics(inference_pb2.GetMetricsRequest())).text.decode()
    return {
        sample.name.removeprefix("quire_router_")
        + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith("quire_router_")
        for sample in family.samples
    }


def up_to(max_tokens: int) -> sampling_pb2.StopConditions:
    return sampling_pb2.StopConditions(max_tokens=max_tokens)


async def test_moves_losses_and_times(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        client.router._recovery._losses._lease = 0.1
        before = await counted(client)
        assert {before[f"worker_losses_total/{cause}"] for cause in ("died", "cut", "failed", "shut_down")} == {0}
        worker.gate.clear()
        answer = asyncio.create_task(client.generate(stopping=up_to(2)))
        await client.until_running(1)
        await asyncio.sleep(0.1)
        await worker.kill()
        async with FakeWorker(**{**worker.hello, "port": worker.port}):  # the same process, by its epoch
            assert (await answer).finished
            after = await counted(client)
            assert (after["moves_total"], after["worker_losses_total/cut"]) == (1, 1)
            assert after["request_queue_time_seconds_count"] == 1, "a move is no arrival"
            assert after["time_to_first_token_seconds_count"] == 1
            assert 0.1 < after["time_to_first_token_seconds_sum"] < 20
            assert after["breaker_openings_total"] == 0


async def test_failures_by_reason(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker, max_num_queued_reqs=1) as client:
        await failure(client.generate(n=9))
        await failure(client.generate(token_ids=inference_pb2.TokenIds(ids=[1000] * 600)))
        await failure(client.generate(model="another"))
        worker.gate.clear()
        failed = asyncio.create_task(failure(client.generate()))
        for count in (1, 2):
            await worker.until(lambda count=count: len(worker.submits) == count)
            key = next(iter(worker.stream.running))
            worker.stream.finish(key, sampling_pb2.FINISH_REASON_ERROR, error="CUDA out of memory in layer 3")
        assert (await failed).reason == "REQUEST_QUARANTINED"
        after = await counted(client)
    reasons = {name: value for name, value in after.items() if name.startswith("requests_failed_total/")}
    assert reasons == {
        "requests_failed_total/invalid_argument": 1,
        "requests_failed_total/context_length_exceeded": 1,
        "requests_failed_total/model_not_found": 1,
        "requests_failed_total/request_quarantined": 1,
    }
    assert after["quarantines_total"] == 1
    assert after["worker_losses_total/died"] == 2

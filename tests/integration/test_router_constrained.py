"""Constrained requests through a real router and a fake worker."""

import asyncio

import grpc
import pytest

from protos import sampling_pb2, worker_pb2
from tests.integration.fake_worker import FakeWorker
from tests.integration.router_stack import failure, running_router

INVALID = worker_pb2.Rejected.REASON_INVALID
REGEX = sampling_pb2.SamplingParams(regex="a+")


@pytest.mark.parametrize(
    "fields",
    [{"regex": "a+"}, {"json_object": True}, {"json_schema": "{}"}, {"grammar": "start: x"},
     {"choices": sampling_pb2.Choices(texts=["a", "b"])}],
)  # fmt: skip
async def test_every_kind_reaches_the_worker_as_it_is(demo_tokenizer, fields):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        await client.generate(
            n=2, sampling=sampling_pb2.SamplingParams(**fields), stopping=sampling_pb2.StopConditions(max_tokens=1)
        )
        (name,) = fields
        for submit in worker.submits:
            assert submit.sampling.WhichOneof("constraint") == name
            assert getattr(submit.sampling, name) == fields[name]


async def test_a_refusal_comes_before_started_and_names_the_field(demo_tokenizer, monkeypatch):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:

        def refuse(stream, submit):
            rejected = worker_pb2.Rejected(
                slot=submit.slot, generation=submit.generation, reason=INVALID, message="no way", field="sampling.regex"
            )
            stream.send(rejected=rejected)

        monkeypatch.setattr(worker, "_on_submit", refuse)
        call = client.call(sampling=REGEX)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        failed = await failure(client.generate(sampling=REGEX))
        assert (failed.field, failed.message) == ("sampling.regex", "no way")


async def test_an_end_that_the_request_is_to_blame_for_says_why(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        worker.gate.clear()
        answer = asyncio.create_task(failure(client.generate(sampling=REGEX)))
        await worker.until(lambda: bool(worker.stream.running))
        ((slot, generation),) = worker.stream.running
        worker.stream.running.clear()
        worker.stream.finished.append(
            worker_pb2.FinishedSlot(
                slot=slot, generation=generation, reason=sampling_pb2.FINISH_REASON_ERROR, error="stuck",
                field="sampling.regex",
            )
        )  # fmt: skip
        worker.stream.wake.set()
        failed = await answer
        assert (failed.code, failed.field, failed.message) == (
            grpc.StatusCode.INVALID_ARGUMENT, "sampling.regex", "stuck",
        )  # fmt: skip

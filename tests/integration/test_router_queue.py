"""What waits and what ends early: the queue's bounds, deadlines, cancellation, shutdown."""

import asyncio
import threading

import grpc
import pytest

from protos import inference_pb2, sampling_pb2
from protos.channel import INFERENCE_CHANNEL_OPTIONS
from router.config import MIN_UNSENT_BYTES
from router.request import unpack_ids
from tests.integration.fake_worker import LENGTH, FakeWorker
from tests.integration.router_stack import Answer, Client, failure, running_router

CANCELLED = inference_pb2.CancelResponse.OUTCOME_CANCELLED
NOT_FOUND = inference_pb2.CancelResponse.OUTCOME_NOT_FOUND


def up_to(max_tokens: int) -> sampling_pb2.StopConditions:
    return sampling_pb2.StopConditions(max_tokens=max_tokens)


async def started(call) -> None:
    """Waits until a worker has begun to run a call."""
    assert (await call.read()).WhichOneof("event") == "started"


async def test_requests_wait_their_turn_in_order(demo_tokenizer):
    async with FakeWorker(max_slots=1) as worker, running_router(demo_tokenizer, worker) as client:
        worker.gate.clear()
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(client.generate(request_id=str(number), stopping=up_to(3))))
            await client.until_explained(lambda explained, number=number: explained.queued == number)
        assert (await client.explain()).chosen == ""
        worker.gate.set()
        answers = await asyncio.gather(*tasks)
        assert all(answer.finished[0].reason == LENGTH for answer in answers)
        assert [submit.request_id for submit in worker.submits] == ["0", "1", "2", "3", "4"]


async def test_urgent_requests_go_first_where_workers_take_priorities(demo_tokenizer):
    async with (
        FakeWorker(max_slots=1, takes_priorities=True) as worker,
        running_router(demo_tokenizer, worker) as client,
    ):
        assert (await client.model()).takes_priorities
        worker.gate.clear()
        tasks = []
        for number, priority in enumerate((0, 7, 0, -2)):
            tasks.append(
                asyncio.create_task(client.generate(request_id=str(number), stopping=up_to(3), priority=priority))
            )
            await client.until_explained(lambda explained, number=number: explained.queued == number)
        worker.gate.set()
        await asyncio.gather(*tasks)
        assert [(submit.request_id, submit.priority) for submit in worker.submits] == [
            ("0", 0), ("3", -2), ("2", 0), ("1", 7),
        ]  # fmt: skip


async def test_a_priority_is_refused_where_workers_take_none(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        assert not (await client.model()).takes_priorities
        failed = await failure(client.generate(priority=1))
        assert (failed.code, failed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "priority")
        assert "--scheduling-policy priority" in failed.message
        assert (await client.generate(priority=0, skip_reading_prefix_cache=True)).finished
        assert [submit.skip_reading_prefix_cache for submit in worker.submits] == [True]


async def test_full_queue_refuses_and_says_when_to_retry(demo_tokenizer):
    async with (
        FakeWorker(max_slots=1) as worker,
        running_router(demo_tokenizer, worker, max_num_queued_reqs=2) as client,
    ):
        worker.gate.clear()
        calls = []
        for number in range(3):
            calls.append(client.call(stopping=up_to(1)))
            if number < 2:  # a full queue has no place for a question either
                await client.until_explained(
                    lambda explained, number=number: (explained.candidates[0].running, explained.queued) == (1, number)
                )
        failed = await failure(client.generate())
        assert (failed.code, failed.retry_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1)
        calls[-1].cancel()  # its place is free again
        await client.until_explained(lambda explained: explained.queued == 1)
        worker.gate.set()
        assert (await client.generate(stopping=up_to(1))).finished


async def test_patience_ends(demo_tokenizer):
    async with (
        FakeWorker(max_slots=1) as worker,
        running_router(demo_tokenizer, worker, max_queue_wait=0.05) as client,
    ):
        worker.gate.clear()
        running = client.call(stopping=up_to(1))
        await started(running)
        await worker.until(lambda: len(worker.submits) == 1)
        failed = await failure(client.call().read())
        assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED, "nothing has started, so that HTTP can say 429"
        worker.gate.set()
        assert (await running.read()).WhichOneof("event") == "delta"  # the one that had a worker was not hurt


class OnePlace(FakeWorker):
    """Takes two sequences and begins to run one of them."""

    def __init__(self) -> None:
        super().__init__(max_slots=2, max_num_seqs=1)

    def _on_submit(self, stream, submit) -> None:
        super()._on_submit(stream, submit)
        if len(stream.running) > 1:
            stream.admitted.pop()


async def test_patience_ends_in_a_workers_own_queue_too(demo_tokenizer):
    async with OnePlace() as worker, running_router(demo_tokenizer, worker, max_queue_wait=0.2) as client:
        worker.gate.clear()
        running = client.call(stopping=up_to(1))
        await started(running)
        failed = await failure(client.call().read())
        assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        await worker.until(lambda: len(worker.cancels) == 1)
        worker.gate.set()
        assert (await running.read()).WhichOneof("event") == "delta"


async def test_queued_requests_outlive_the_last_worker(demo_tokenizer):
    async with FakeWorker(max_slots=1) as worker, running_router(demo_tokenizer, worker) as client:
        worker.gate.clear()
        first = asyncio.create_task(client.generate(stopping=up_to(1)))
        await client.until_running(1)
        second = asyncio.create_task(client.generate(stopping=up_to(1)))
        await client.until_explained(lambda explained: explained.queued == 1)
        await worker.kill()
        async with FakeWorker(port=worker.port, max_slots=1) as again:
            for request in (first, second):
                assert (await request).finished[0].reason == LENGTH
        assert [submit.request_id for submit in again.submits][:1] == [worker.submits[0].request_id], "its turn again"


@pytest.mark.parametrize("waiting", [False, True])
async def test_deadline_ends_a_request_wherever_it_is(demo_tokenizer, waiting):
    async with FakeWorker(max_slots=1) as worker, running_router(demo_tokenizer, worker) as client:
        worker.gate.clear()
        blocker = client.call()
        if waiting:
            await started(blocker)
            await client.until_running(1)
        else:
            blocker.cancel()
            await client.until_running(0)
        failed = await failure(client.generate(timeout=0.2))
        assert failed.code == grpc.StatusCode.DEADLINE_EXCEEDED
        await client.until_explained(lambda explained: not explained.queued)
        blocker.cancel()
        await client.until_running(0)


async def test_request_can_be_cancelled_while_its_prompt_is_tokenized(demo_tokenizer, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def slow(text: str, *, add_special_tokens: bool = True) -> list[int]:
        begun.set()
        go_on.wait(20)
        return [1, 2]

    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        monkeypatch.setattr(demo_tokenizer, "encode_text", slow)
        call = client.call(request_id="r")
        await asyncio.to_thread(begun.wait, 20)
        reply = await client.stub.Cancel(inference_pb2.CancelRequest(request_ids=["r"]))
        assert reply.results[0].outcome == CANCELLED
        go_on.set()
        assert (await failure(call.read())).code == grpc.StatusCode.CANCELLED
        assert not worker.submits


@pytest.mark.parametrize("how", ["client goes away", "Cancel"])
async def test_cancelled_requests_leave_their_workers(demo_tokenizer, how):
    async with FakeWorker(max_slots=2) as worker, running_router(demo_tokenizer, worker) as client:
        worker.gate.clear()
        call = client.call(request_id="r", n=3)  # two run, one waits
        await started(call)
        await client.until_running(2)
        if how == "Cancel":
            reply = await client.stub.Cancel(inference_pb2.CancelRequest(request_ids=["r", "x", "r"]))
            assert [result.outcome for result in reply.results] == [CANCELLED, NOT_FOUND, NOT_FOUND]
            assert [result.request_id for result in reply.results] == ["r", "x", "r"]
            assert reply.results[0].usage.prompt_tokens == 3 * 4
            assert (await failure(call.read())).code == grpc.StatusCode.CANCELLED
        else:
            call.cancel()
        await client.until_running(0)
        assert len(worker.cancels) == 2
        assert (await client.explain()).queued == 0
        worker.gate.set()
        assert (await client.generate(request_id="r", stopping=up_to(1))).finished


async def test_slot_is_free_only_when_the_worker_says_so(demo_tokenizer):
    async with FakeWorker(max_slots=1) as worker, running_router(demo_tokenizer, worker) as client:
        worker.gate.clear()
        call = client.call()
        await started(call)
        await worker.until(lambda: len(worker.submits) == 1)
        worker.stream.credit = 0  # so that the worker's answer waits
        call.cancel()
        await worker.until(lambda: len(worker.cancels) == 1)
        second = client.call(stopping=up_to(1))
        await client.until_explained(lambda explained: explained.queued == 1)
        assert len(worker.submits) == 1
        worker.stream.credit = 10
        worker.stream.wake.set()
        await worker.until(lambda: len(worker.submits) == 2)
        assert worker.submits[1].generation > worker.submits[0].generation
        worker.gate.set()
        await started(second)
        assert (await second.read()).WhichOneof("event") == "delta"


async def test_slow_client_costs_no_messages(demo_tokenizer):
    """What comes while a client does not read goes out in few Deltas, with nothing missing."""
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        slow = client.call(stopping=up_to(400), output=inference_pb2.OutputOptions(token_ids=True))
        await started(slow)
        await client.until_running(0)  # generated to the end while nobody read
        tokens = []
        while (response := await slow.read()).WhichOneof("event") == "delta":
            assert response.delta.first_index == len(tokens)
            tokens.extend(response.delta.token_ids)
        assert len(tokens) == 400
        assert response.finished.reason == LENGTH


async def test_shutdown_lets_running_requests_finish_and_refuses_new_ones(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        worker.gate.clear()
        running = client.call(stopping=up_to(20))
        await started(running)
        stopping = asyncio.create_task(client.router.stop(20))
        await asyncio.sleep(0)
        failed = await failure(client.generate())
        assert failed.code == grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in failed.message
        worker.gate.set()
        responses = []
        while (response := await running.read()) is not grpc.aio.EOF:
            responses.append(response)
        assert responses[-1].finished.reason == LENGTH
        await stopping


async def test_shutdown_ends_what_does_not_finish(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        worker.gate.clear()
        running = client.call()
        await started(running)
        stopping = asyncio.create_task(client.router.stop(0.05))
        assert (await failure(running.read())).code == grpc.StatusCode.UNAVAILABLE
        await stopping


@pytest.fixture
async def unread(demo_tokenizer):
    """A worker, a client of its router, and a stream that was paused since nobody reads it; what it gave so far."""
    fake = FakeWorker(max_model_len=100_000, max_slots=1, max_num_seqs=1)
    async with (
        fake,
        running_router(demo_tokenizer, fake, max_unsent_bytes=MIN_UNSENT_BYTES) as client,
        grpc.aio.insecure_channel(client.address, options=INFERENCE_CHANNEL_OPTIONS) as channel,
    ):
        output = inference_pb2.OutputOptions(text=True, token_ids=True)
        call = Client(client.router, client.address, channel).call(stopping=up_to(20_000), output=output)
        answer = Answer()
        for _ in ("started", "delta"):
            answer.add(await call.read())
        await fake.until(lambda: bool(fake.cancels))
        yield fake, client, call, answer


async def test_a_stream_that_is_not_read_is_paused_and_goes_on(unread):
    fake, client, call, answer = unread
    # Its slot is free for others meanwhile.
    assert (await client.generate(stopping=up_to(3))).finished[0].reason == LENGTH
    while (event := await call.read()) is not grpc.aio.EOF:
        answer.add(event)
    first, *later = (submit for submit in fake.submits if submit.request_id == answer.started[0].request_id)
    assert answer.ids() == [fake.token(list(unpack_ids(first.prompt_token_ids)), index) for index in range(20_000)]
    assert answer.finished[0].usage.completion_tokens == 20_000
    assert later
    assert all(1000 <= submit.num_emitted < 20_000 for submit in later)


async def test_a_client_that_hangs_up_without_reading_is_no_error(unread, caplog):
    _, client, call, _ = unread
    call.cancel()
    assert (await client.generate(stopping=up_to(3))).finished[0].reason == LENGTH
    async with asyncio.timeout(20):
        while client.router._inference._running:
            await asyncio.sleep(0.01)
    assert [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []

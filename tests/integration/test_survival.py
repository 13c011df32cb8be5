"""Streams that outlive their worker: the router in this process, scripted workers over real sockets."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest

from protos import inference_pb2, sampling_pb2, worker_pb2
from router.circuit_breaker import MAX_LOSSES
from router.recovery import UNSEEN_TOKENS
from router.worker_link import LinkLost, next_message
from router.worker_loss import Loss
from tests.doubles.processes import free_port
from tests.integration.fake_worker import LENGTH, FakeWorker, count_up, step_batch
from tests.integration.router_stack import NOT_SERVING, SERVING, Answer, failure, running_router

UNAVAILABLE, INTERNAL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL
IDS = inference_pb2.OutputOptions(token_ids=True)


def up_to(max_tokens: int, **more) -> sampling_pb2.StopConditions:
    return sampling_pb2.StopConditions(max_tokens=max_tokens, **more)


def held(worker: FakeWorker) -> FakeWorker:
    """A worker that takes sequences and computes nothing."""
    worker.gate.clear()
    return worker


class Pausing(FakeWorker):
    """Computes so many tokens of a sequence and then none, so that it can be lost in the middle."""

    def __init__(self, pause_at: int, **settings) -> None:
        def token(prompt: list[int], index: int) -> int:
            if index + 1 == pause_at:
                self.gate.clear()
            return count_up(prompt, index)

        super().__init__(token=token, **settings)


async def until_delivered(call, answer: Answer, count: int) -> None:
    """Reads a call until so many ids came."""
    while len(answer.ids()) < count:
        answer.add(await call.read())


async def rest_of(call, answer: Answer) -> Answer:
    """Reads a call to its end."""
    while (response := await call.read()) is not grpc.aio.EOF:
        answer.add(response)
    return answer


def expected(tokenizer, count: int) -> list[int]:
    prompt = tokenizer.encode_text("Once upon a time")
    return [count_up(prompt, index) for index in range(count)]


async def test_a_stream_goes_on_elsewhere_where_it_was(demo_tokenizer):
    sampling = sampling_pb2.SamplingParams(
        temperature=0.7, seed=5, frequency_penalty=0.5, repetition_penalty=1.1, json_object=True
    )
    stopping = up_to(60, min_tokens=50, stop_token_ids=[1999], bad_words=["fox"])
    second = FakeWorker(worker_id="b", port=free_port())
    async with (
        Pausing(20, worker_id="a") as first,
        running_router(demo_tokenizer, first, second.address) as client,
    ):
        call = client.call(sampling=sampling, stopping=stopping, output=IDS, cache_salt="salt")
        answer = Answer()
        await until_delivered(call, answer, 20)
        async with second:
            await client.until_ready(2)
            await first.kill()
            answer = await rest_of(call, answer)
    assert answer.ids() == expected(demo_tokenizer, 60)
    usage = answer.finished[0].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 60)
    before, after = first.submits[0], second.submits[0]
    ids = before.prompt_token_ids
    assert after.prompt_token_ids[: len(ids)] == ids
    assert after.num_emitted == 20
    assert len(after.prompt_token_ids) == len(ids) + 4 * 20
    for submit in (before, after):  # all else is as it was: what the worker may generate does not depend on who asks
        submit.ClearField("prompt_token_ids")
        submit.ClearField("num_emitted")
        submit.ClearField("time_left_ms")
    assert before == after


async def test_a_drawn_seed_moves_with_its_choices(demo_tokenizer):
    async with (
        held(FakeWorker(worker_id="a")) as first,
        held(FakeWorker(worker_id="b", max_slots=8)) as second,
        running_router(demo_tokenizer, first, second, policy="round_robin") as client,
    ):
        answer = asyncio.create_task(client.generate(n=4, stopping=up_to(5), output=IDS))
        await client.until_explained(lambda _: len(first.submits) + len(second.submits) == 4)
        lost, kept = (first, second) if first.submits else (second, first)
        seeds = [submit.sampling.seed for submit in (*first.submits, *second.submits)]
        before = [submit.sampling.seed for submit in lost.submits]
        assert sorted(seeds) == list(range(min(seeds), min(seeds) + 4))
        await lost.kill()
        kept.gate.set()
        assert len((await answer).finished) == 4
        assert sorted(submit.sampling.seed for submit in kept.submits) == sorted(seeds)
        assert [s.sampling.seed for s in kept.submits[-len(before) :]] == before, "in the order of their turns"


async def test_prompt_and_output_logprobs_come_once(demo_tokenizer):
    def report(submit: worker_pb2.Submit, first: int, values: list[float]) -> worker_pb2.RowLogprobs:
        logprobs = sampling_pb2.Logprobs(logprobs=values)
        return worker_pb2.RowLogprobs(
            slot=submit.slot, generation=submit.generation, first_index=first, logprobs=logprobs
        )

    output = inference_pb2.OutputOptions(token_ids=True, logprobs=0, prompt_logprobs=0)
    async with (
        held(FakeWorker(worker_id="a")) as first,
        running_router(demo_tokenizer, first) as client,
        held(FakeWorker(worker_id="b")) as second,
    ):
        call = client.call(stopping=up_to(3), output=output)
        await first.until(lambda: len(first.submits) == 1)
        submit = first.submits[0]
        assert submit.HasField("prompt_logprobs")
        first.stream.send(
            step_batch=step_batch(
                [(submit.slot, submit.generation, 0, [1001])],
                prompt_logprobs=[report(submit, 1, [-1, -2, -3])],
                logprobs=[report(submit, 0, [-0.5])],
            )
        )
        answer = Answer()
        reports = []
        while not answer.deltas:
            response = await call.read()
            reports += [response.prompt_logprobs] if response.HasField("prompt_logprobs") else []
            answer.add(response)
        await first.kill()
        async with held(FakeWorker(port=first.port)) as second:
            await second.until(lambda: len(second.submits) == 1)
            submit = second.submits[0]
            assert not submit.HasField("prompt_logprobs"), "they are known"
            row = (submit.slot, submit.generation)
            done = worker_pb2.FinishedSlot(
                slot=row[0], generation=row[1], reason=LENGTH, usage=sampling_pb2.Usage(completion_tokens=3)
            )
            second.stream.send(
                step_batch=step_batch(
                    [(*row, 1, [1002, 1003])], logprobs=[report(submit, 1, [-0.25, -0.125])], finished=[done]
                )
            )
            answer = await rest_of(call, answer)
    assert len(reports) == 1
    assert list(reports[0].logprobs.logprobs)[1:] == [-1, -2, -3]
    assert [value for delta in answer.deltas for value in delta.logprobs.logprobs] == [-0.5, -0.25, -0.125]


async def test_stop_strings_are_found_across_the_loss(demo_tokenizer):
    """The text held back as the possible start of a stop string is the router's, and no worker's."""
    ids = expected(demo_tokenizer, 30)
    tokens = [demo_tokenizer.token_bytes.join([token_id]).decode() for token_id in ids]
    stop = tokens[14] + tokens[15] + tokens[16]
    async with (
        Pausing(16) as first,
        FakeWorker() as second,
        running_router(demo_tokenizer, first, second) as client,
    ):
        call = client.call(stopping=up_to(30, stop=[stop]), output=IDS)
        answer = Answer()
        await until_delivered(call, answer, 16)
        await first.kill()
        answer = await rest_of(call, answer)
    assert answer.finished[0].stop_string == stop
    assert answer.text() == "".join(tokens[:14])
    assert answer.ids() == ids[:17]


async def test_usage_counts_what_the_first_worker_had_cached(demo_tokenizer):
    async with Pausing(3) as worker, running_router(demo_tokenizer, worker) as client:
        call = client.call(stopping=up_to(6), output=IDS)
        answer = Answer()
        await until_delivered(call, answer, 3)
        await worker.kill()
        async with held(FakeWorker(port=worker.port)) as again:
            await again.until(lambda: len(again.submits) == 1)
            key = next(iter(again.stream.running))
            usage = sampling_pb2.Usage(prompt_tokens=4, completion_tokens=6, cached_tokens=5)
            done = worker_pb2.FinishedSlot(slot=key[0], generation=key[1], reason=LENGTH, usage=usage)
            rows = [(*key, 3, expected(demo_tokenizer, 6)[3:])]
            again.stream.send(step_batch=step_batch(rows, finished=[done]))
            answer = await rest_of(call, answer)
    assert answer.finished[0].usage == sampling_pb2.Usage(prompt_tokens=4, completion_tokens=6, cached_tokens=3)


async def test_waits_for_the_last_worker_to_come_back(demo_tokenizer):
    async with Pausing(10) as worker, running_router(demo_tokenizer, worker) as client:
        call = client.call(stopping=up_to(40), output=IDS)
        answer = Answer()
        await until_delivered(call, answer, 10)
        await worker.kill()
        await client.until_ready(0)
        assert (await client.model()).max_model_len == 0
        assert await client.health() == NOT_SERVING
        assert await client.health("") == SERVING
        assert (await failure(client.generate())).code == UNAVAILABLE, "what is new is refused at once"
        async with FakeWorker(port=worker.port):
            answer = await rest_of(call, answer)
    assert answer.ids() == expected(demo_tokenizer, 40)


@pytest.mark.parametrize("by_deadline", [False, True])
async def test_waits_no_longer_than_it_may(demo_tokenizer, by_deadline):
    async with Pausing(10) as worker, running_router(demo_tokenizer, worker, max_queue_wait=1.0) as client:
        call = client.call(timeout=0.5 if by_deadline else 30, stopping=up_to(40), output=IDS)
        await until_delivered(call, Answer(), 10)
        await worker.kill()
        failed = await failure(rest_of(call, Answer()))
        assert failed.code == (grpc.StatusCode.DEADLINE_EXCEEDED if by_deadline else UNAVAILABLE)
        if not by_deadline:
            assert "no other" in failed.message
            assert failed.retry_s == 1


async def test_a_worker_that_does_not_answer_counts_as_lost(demo_tokenizer):
    async with (
        held(FakeWorker(worker_id="a")) as worker,
        running_router(demo_tokenizer, worker, worker_timeout=0.2) as client,
    ):
        answer = asyncio.create_task(client.generate(stopping=up_to(5), output=IDS))
        await worker.until(lambda: len(worker.submits) == 1)
        worker.deaf = True
        old, key = worker.stream, next(iter(worker.stream.running))
        await worker.until(lambda: len(worker.streams) == 2)
        worker.deaf = False
        worker.gate.set()
        old.send(step_batch=step_batch([(*key, 0, [9, 9, 9])]))  # too late: the stream is gone
        assert (await answer).ids() == expected(demo_tokenizer, 5)


async def test_a_suspect_worker_gets_nothing_new_until_it_answers_again(demo_tokenizer):
    async with (
        FakeWorker(worker_id="a", max_slots=8) as first,
        FakeWorker(worker_id="b", max_slots=1) as second,
        running_router(demo_tokenizer, first, second, worker_timeout=4.0) as client,
    ):
        await client.generate(stopping=up_to(1))
        first.pong = {"step": 100, "step_age_ms": 1500, "step_time_us": 20_000}
        await asyncio.sleep(0.6)
        count = len(first.submits)
        await asyncio.gather(*(client.generate(stopping=up_to(2)) for _ in range(6)))
        assert len(first.submits) == count
        first.pong = {"step": 200, "step_time_us": 20_000}
        await second.kill()
        await client.generate(stopping=up_to(2))
        assert len(first.submits) == count + 1


async def test_a_step_that_never_ends_loses_the_worker(demo_tokenizer):
    async with (
        held(FakeWorker(worker_id="a")) as worker,
        running_router(demo_tokenizer, worker) as client,
    ):
        answer = asyncio.create_task(client.generate(stopping=up_to(5), output=IDS))
        await worker.until(lambda: len(worker.submits) == 1)
        worker.pong = {"step": 100, "step_age_ms": 11_000, "step_time_us": 20_000}
        await worker.until(lambda: len(worker.streams) == 2)
        worker.pong = {}
        worker.gate.set()
        assert (await answer).ids() == expected(demo_tokenizer, 5)


async def test_other_workers_requests_are_unhurt(demo_tokenizer):
    async with (
        held(FakeWorker(worker_id="a", max_slots=1)) as a,
        held(FakeWorker(worker_id="b", max_slots=1)) as b,
        running_router(demo_tokenizer, a, b) as client,
    ):
        calls = [asyncio.create_task(client.generate(stopping=up_to(5), output=IDS)) for _ in range(2)]
        await a.until(lambda: len(a.submits) == 1)
        await b.until(lambda: len(b.submits) == 1)
        await a.kill()
        b.gate.set()
        assert [(await call).ids() for call in calls] == [expected(demo_tokenizer, 5)] * 2
        assert [submit.num_emitted for submit in b.submits] == [0, 0]


@pytest.mark.parametrize(
    ("code", "details", "loss"),
    [
        (UNAVAILABLE, "Socket closed", Loss.BROKEN),
        # grpc.aio's own words for a connection that broke under a write.
        (INTERNAL, "Internal error from Core", Loss.BROKEN),
        (INTERNAL, "out of memory", Loss.FAILED),
    ],
)
async def test_a_broken_connection_is_told_from_a_workers_answer(code, details, loss):
    class Ended:
        async def read(self):
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    with pytest.raises(LinkLost) as lost:
        await next_message(Ended())
    assert lost.value.loss is loss


@pytest.mark.parametrize("index", [0, UNSEEN_TOKENS, 30])
async def test_no_third_worker_is_risked_on_what_two_died_of(demo_tokenizer, index):
    workers = [FakeWorker(worker_id=name) for name in "abc"]
    for worker in workers:
        worker.dies_at = index
    async with workers[0], workers[1], workers[2], running_router(demo_tokenizer, *workers) as client:
        client.router._recovery._losses._lease = 1.5
        failed = await failure(client.generate(stopping=up_to(50)))
        assert (failed.code, failed.reason) == (INTERNAL, "REQUEST_QUARANTINED")
        assert "crashed" in failed.message
        await client.until_ready(1)
        again = await failure(client.generate(stopping=up_to(50)))
        assert again.reason == "REQUEST_QUARANTINED", "sent again, it reaches no worker"
        assert sum(len(worker.submits) for worker in workers) == 2
        for worker in workers:
            worker.dies_at = None
        assert (await client.generate(text="Another prompt", stopping=up_to(2))).finished


async def test_an_engines_failure_counts_as_a_crash(demo_tokenizer, caplog):
    async with held(FakeWorker()) as worker, running_router(demo_tokenizer, worker) as client:
        answer = asyncio.create_task(failure(client.generate(request_id="r7")))
        for count in (1, 2):
            await worker.until(lambda count=count: len(worker.submits) == count)
            key = next(iter(worker.stream.running))
            worker.stream.finish(key, sampling_pb2.FINISH_REASON_ERROR, error="CUDA out of memory in layer 3")
        failed = await answer
        assert (failed.code, failed.reason) == (INTERNAL, "REQUEST_QUARANTINED")
        assert "CUDA" not in failed.message
        assert any("CUDA" in line for line in caplog.messages)
        assert any("r7" in line for line in caplog.messages)


@pytest.mark.parametrize("anew", [False, True], ids=["cut", "killed"])
async def test_all_workers_lost_in_one_moment_cost_nobody_his_answer(demo_tokenizer, anew):
    """Twice, before any stream has come further; the router may still send streams to a worker that is gone."""
    workers = [held(FakeWorker(worker_id=name, max_slots=8, max_num_seqs=8)) for name in "ab"]
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        client = await stack.enter_async_context(running_router(demo_tokenizer, *workers))
        answers = [asyncio.create_task(client.generate(stopping=up_to(5), output=IDS)) for _ in range(6)]
        for _ in range(2):
            await client.until_running(6)
            await asyncio.sleep(0.1)  # all were told of as begun
            await asyncio.gather(*(worker.kill() for worker in workers))
            workers = [
                held(FakeWorker(**{**worker.hello, "port": worker.port, **fields}))
                for worker in workers
                for fields in [{"epoch": worker.hello["epoch"] + 1} if anew else {}]
            ]
            for worker in workers:
                await stack.enter_async_context(worker)
            await client.until_ready(2)
        for worker in workers:
            worker.gate.set()
        assert [(await answer).ids() for answer in answers] == [expected(demo_tokenizer, 5)] * 6
        assert (await client.generate(stopping=up_to(5), output=IDS)).finished, "the prompt is not refused"


async def test_hung_attempts_that_bring_nothing_are_bounded(demo_tokenizer):
    async with (
        held(FakeWorker()) as worker,
        running_router(demo_tokenizer, worker, worker_timeout=0.2, max_attempts=2) as client,
    ):
        worker.mute = True
        failed = await failure(client.generate())
        assert len(worker.submits) == 2
        assert failed.code == UNAVAILABLE
        assert "2 workers" in failed.message


async def test_a_stream_that_advances_outlives_any_number_of_workers(demo_tokenizer):
    total = 6 * (UNSEEN_TOKENS + 2)
    port = 0
    answer = Answer()
    async with FakeWorker() as reserved:
        port = reserved.port
    async with running_router(demo_tokenizer, f"127.0.0.1:{port}") as client:
        call = None
        for attempt in range(1, 7):
            async with Pausing(attempt * (UNSEEN_TOKENS + 2), port=port):
                if call is None:
                    await client.until_ready()
                    call = client.call(stopping=up_to(total), output=IDS)
                await until_delivered(call, answer, attempt * (UNSEEN_TOKENS + 2))
        answer = await rest_of(call, answer)
    assert answer.ids() == expected(demo_tokenizer, total)


async def test_a_worker_that_crashes_again_and_again_rests_and_is_tried(demo_tokenizer):
    async with FakeWorker() as former:
        port = former.port
    async with (
        FakeWorker(worker_id="good", max_slots=8) as good,
        running_router(demo_tokenizer, good, f"127.0.0.1:{port}", policy="round_robin") as client,
    ):
        link = client.router._fleet.links[1]
        link._breaker._pause = 1.0
        for _ in range(MAX_LOSSES):
            async with held(FakeWorker(port=port)) as bad:
                await client.until_ready(2)
                answers = [asyncio.create_task(client.generate(stopping=up_to(5))) for _ in range(2)]
                await bad.until(lambda bad=bad: bool(bad.submits))
            assert all(answer.finished for answer in await asyncio.gather(*answers)), "the other one took it up"
        async with FakeWorker(port=port, max_slots=8) as mended:
            await client.until_ready(2)
            await asyncio.gather(*(client.generate(stopping=up_to(2)) for _ in range(4)))
            assert not mended.submits, "it rests"
            await asyncio.sleep(1.0)
            await client.generate(stopping=up_to(2))
            await client.generate(stopping=up_to(2))
            assert len(mended.submits) == 1, "its probe"
            await asyncio.gather(*(client.generate(stopping=up_to(2)) for _ in range(4)))
            assert len(mended.submits) >= 2, "trusted again"
            await good.kill()
            assert (await client.generate(stopping=up_to(2))).finished

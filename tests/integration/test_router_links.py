"""The protocol between router and workers over real sockets: credit, fencing, loss, refusals, and who gets what."""

import asyncio

import grpc
import pytest

from protos import inference_pb2, sampling_pb2, worker_pb2
from router.worker_link import CREDIT_WINDOW
from tests.integration.fake_worker import LENGTH, FakeWorker, count_up, step_batch
from tests.integration.router_stack import failure, running_router

IDS = inference_pb2.OutputOptions(token_ids=True)


def up_to(max_tokens: int) -> sampling_pb2.StopConditions:
    return sampling_pb2.StopConditions(max_tokens=max_tokens)


def held(worker: FakeWorker) -> FakeWorker:
    """A worker that takes sequences and computes nothing, so that a test can speak for it."""
    worker.gate.clear()
    return worker


async def test_a_worker_that_loads_its_model_is_asked_again_at_once(demo_tokenizer):
    # At the pace at which workers that are away are looked for, this would take more than half a minute.
    async with FakeWorker(loading=20) as worker, running_router(demo_tokenizer, worker) as client:
        assert worker.loading == 0
        await client.generate(stopping=up_to(2))


async def test_credit_bounds_what_is_under_way_and_is_replenished(demo_tokenizer):
    async with FakeWorker() as worker, running_router(demo_tokenizer, worker) as client:
        # The fake sends no batch without credit, so it comes to an end only if credit is replenished.
        while worker.batches < 3 * CREDIT_WINDOW:
            await client.generate(stopping=up_to(5))
        assert worker.credits[0] == CREDIT_WINDOW
        assert sum(worker.credits) <= worker.batches + CREDIT_WINDOW


async def test_without_credit_tokens_are_merged_and_none_is_lost(demo_tokenizer):
    async with FakeWorker(merge=7) as worker, running_router(demo_tokenizer, worker) as client:
        answers = await asyncio.gather(*(client.generate(stopping=up_to(100), output=IDS) for _ in range(4)))
        prompt = demo_tokenizer.encode_text("Once upon a time")
        assert all(answer.ids() == [count_up(prompt, i) for i in range(100)] for answer in answers)


async def test_rows_are_fenced_and_repeated_tokens_dropped(demo_tokenizer):
    async with held(FakeWorker()) as worker, running_router(demo_tokenizer, worker) as client:
        answer = asyncio.create_task(client.generate(stopping=up_to(4), output=IDS))
        await worker.until(lambda: len(worker.submits) == 1)
        slot, generation = worker.submits[0].slot, worker.submits[0].generation
        other = (slot + 1) % 4
        for rows in (
            [(slot, generation + 1, 0, [9])],  # a generation that is not
            [(slot, generation - 1, 5, [9])],  # the one before
            [(other, generation, 0, [9])],  # a slot that nobody has
            [(slot, generation, 0, [1001, 1002])],
            [(slot, generation, 0, [1001, 1002])],  # again
            [(slot, generation, 1, [1002, 1003]), (slot, generation, 3, [1004])],
        ):
            worker.stream.send(step_batch=step_batch(rows))
        usage = sampling_pb2.Usage(completion_tokens=4)
        done = worker_pb2.FinishedSlot(slot=slot, generation=generation, reason=LENGTH, usage=usage)
        late = worker_pb2.FinishedSlot(slot=slot, generation=generation - 1, reason=LENGTH)
        worker.stream.send(step_batch=step_batch([], finished=[late]))
        worker.stream.send(step_batch=step_batch([], finished=[done, done]))
        assert (await answer).ids() == [1001, 1002, 1003, 1004]
        worker.stream.running.clear()
        # A slot that was freed twice would be given to two sequences now.
        calls = [client.call(stopping=up_to(2)) for _ in range(5)]
        await worker.until(lambda: len(worker.submits) == 5)
        assert len({submit.slot for submit in worker.submits[1:]}) == 4
        for call in calls:
            call.cancel()


BROKEN = [
    lambda slot, generation: {"step_batch": step_batch([(slot, generation, 3, [1])])},
    lambda slot, generation: {"step_batch": worker_pb2.StepBatch(slots=[slot], generations=[generation], counts=[1])},
    lambda slot, generation: {"step_batch": step_batch([(4, generation, 0, [1])])},
    lambda slot, generation: {
        "step_batch": step_batch(
            [],
            finished=[
                worker_pb2.FinishedSlot(
                    slot=slot, generation=generation, reason=LENGTH, usage=sampling_pb2.Usage(completion_tokens=2)
                )
            ],
        )
    },
    lambda slot, generation: {"hello": worker_pb2.Hello()},
]


@pytest.mark.parametrize("wrong", BROKEN, ids=["gap", "columns", "slot", "tokens missing at the end", "second Hello"])
async def test_stream_that_contradicts_itself_is_made_anew(demo_tokenizer, wrong):
    async with held(FakeWorker()) as worker, running_router(demo_tokenizer, worker) as client:
        answer = asyncio.create_task(client.generate(stopping=up_to(4), output=IDS))
        await worker.until(lambda: len(worker.submits) == 1)
        worker.stream.send(**wrong(worker.submits[0].slot, worker.submits[0].generation))
        await worker.until(lambda: len(worker.streams) == 2)
        worker.gate.set()
        assert (await answer).ids() == [count_up(demo_tokenizer.encode_text("Once upon a time"), i) for i in range(4)]


async def test_full_worker_is_asked_again_and_order_is_kept(demo_tokenizer):
    full = worker_pb2.Rejected.REASON_FULL
    async with FakeWorker(reject=[full, full]) as worker, running_router(demo_tokenizer, worker) as client:
        answers = await asyncio.gather(*(client.generate(request_id=f"r{i}", stopping=up_to(5)) for i in range(2)))
        assert all(answer.finished[0].reason == LENGTH for answer in answers)
        assert len(worker.submits) == 4
        assert {submit.request_id for submit in worker.submits[2:]} == {"r0", "r1"}


async def test_refusal_for_good_reaches_the_client(demo_tokenizer):
    invalid = worker_pb2.Rejected.REASON_INVALID
    async with FakeWorker(reject=[invalid]) as worker, running_router(demo_tokenizer, worker) as client:
        failed = await failure(client.generate())
        assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
        assert (await client.generate(stopping=up_to(1))).finished


async def test_draining_worker_gets_nothing_new(demo_tokenizer):
    draining = worker_pb2.Rejected.REASON_DRAINING
    async with (
        FakeWorker(worker_id="old", reject=[draining]) as old,
        FakeWorker(worker_id="new", max_slots=1) as new,
        running_router(demo_tokenizer, old, new, policy="round_robin") as client,
    ):
        for _ in range(4):
            await client.generate(stopping=up_to(2))
        assert len(old.submits) == 1
        assert len(new.submits) == 4
        assert (await client.model()).ready_workers == 1


async def test_the_workers_deadline_becomes_a_status(demo_tokenizer):
    async with held(FakeWorker()) as worker, running_router(demo_tokenizer, worker) as client:
        answer = asyncio.create_task(failure(client.generate()))
        await worker.until(lambda: bool(worker.stream.running))
        worker.stream.finish(next(iter(worker.stream.running)), sampling_pb2.FINISH_REASON_DEADLINE)
        assert (await answer).code == grpc.StatusCode.DEADLINE_EXCEEDED


STRANGERS = [
    {"protocol_version": 1},
    {"vocab_size": 100},
    {"max_slots": 0},
    {"manifest_hash": "another"},
    {"max_model_len": 100},
    {"epoch": 1},
    {"worker_id": "w" * 257},
    {"worker_id": "w1\nINFO router: forged"},
    {"model": "m\x00"},
]


@pytest.mark.parametrize("hello", STRANGERS, ids=lambda hello: next(iter(hello)))
async def test_workers_that_do_not_belong_are_not_used(demo_tokenizer, hello, caplog):
    async with FakeWorker(epoch=1) as worker, FakeWorker() as former:
        await former.kill()
        async with (
            running_router(demo_tokenizer, worker, former.address) as client,
            FakeWorker(port=former.port, **{"epoch": 2, **hello}) as stranger,
        ):
            await stranger.until(lambda: len(stranger.streams) >= 3)  # it was tried again and again
            assert (await client.model()).ready_workers == 1
            assert not stranger.submits
            warnings = [line for line in caplog.messages if stranger.address in line and "UNAVAILABLE" not in line]
            assert len(warnings) == 1, "said once, not at each attempt"


async def test_least_load_fills_the_emptier_worker_and_keeps_choices_together(demo_tokenizer):
    async with (
        held(FakeWorker(worker_id="a", max_slots=8)) as a,
        held(FakeWorker(worker_id="b", max_slots=8)) as b,
        running_router(demo_tokenizer, a, b) as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(client.generate(token_ids=inference_pb2.TokenIds(ids=[7] * 300), stopping=up_to(2)))
        await client.until_running(1)
        on_a = next(c.running for c in (await client.explain()).candidates if c.worker == "a")
        loaded, empty = (a, b) if on_a else (b, a)
        group.create_task(client.generate(n=4, stopping=up_to(2)))
        await client.until_running(5)
        explained = await client.explain()
        running = {candidate.worker: candidate.running for candidate in explained.candidates}
        assert running == {loaded.hello["worker_id"]: 1, empty.hello["worker_id"]: 4}
        scores = {candidate.worker: candidate.score for candidate in explained.candidates}
        assert scores[loaded.hello["worker_id"]] > scores[empty.hello["worker_id"]]
        assert explained.chosen == empty.hello["worker_id"]
        a.gate.set()
        b.gate.set()


async def test_round_robin_takes_turns(demo_tokenizer):
    async with (
        FakeWorker() as a,
        FakeWorker() as b,
        running_router(demo_tokenizer, a, b, policy="round_robin") as client,
    ):
        for turn in range(1, 4):
            await client.generate(stopping=up_to(1))
            await client.generate(stopping=up_to(1))
            assert (len(a.submits), len(b.submits)) == (turn, turn)

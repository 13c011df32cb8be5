"""The Worker service over a real socket, with a real engine and a fake model."""

import asyncio
import time
from array import array
from contextlib import asynccontextmanager

import grpc
import pytest

from protos import sampling_pb2, worker_pb2, worker_pb2_grpc
from protos.channel import LOADING
from protos.prefix import block_hashes
from tests.doubles.fake_runner import STOP, VOCAB, FakeRunner, next_token
from tests.doubles.prefix_mirror import PrefixMirror, split
from tests.doubles.scheduler_load import Guesser
from worker.block_pool import BlockPool
from worker.engine import Engine, EngineLimits
from worker.grammar import GrammarCompiler
from worker.scheduler import Scheduler
from worker.server import WorkerServicer
from worker.speculation.speculator import Speculator
from worker.vocabulary import VocabularyError

LIMITS = EngineLimits("fake", "hash", VOCAB, 4, 64, 100, 4, 32)
SLOTS = 5  # what a worker with four sequences gives out


class SlowRunner(FakeRunner):
    """Steps can be held back, or made to fail."""

    def __init__(self) -> None:
        super().__init__(LIMITS.num_blocks, LIMITS.block_size, LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens)
        self.delay = 0.0
        self.fail = False

    def launch(self, plan):
        time.sleep(self.delay)
        if self.fail:
            raise RuntimeError("secret detail")
        return super().launch(plan)


class Router:
    """The other end of one stream."""

    def __init__(self, call) -> None:
        self.call = call
        self.hello = None

    async def send(self, **message) -> None:
        await self.call.write(worker_pb2.RouterMessage(**message))

    async def read(self, kind: str):
        message = await asyncio.wait_for(self.call.read(), 10)
        assert message is not grpc.aio.EOF, "the stream ended"
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def submit(self, prompt, slot=0, generation=1, max_tokens=5, **fields) -> None:
        sampling = sampling_pb2.SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=0)
        submit = {
            "slot": slot,
            "generation": generation,
            "request_id": "test",
            "prompt_token_ids": array("I", prompt).tobytes(),
            "sampling": sampling,
            "max_tokens": max_tokens,
            "stop_token_ids": [STOP],
        }
        await self.send(submit=worker_pb2.Submit(**{**submit, **fields}))

    async def credit(self, count: int = 1000) -> None:
        await self.send(credit=worker_pb2.Credit(step_batches=count))

    async def until_finished(self, count: int = 1):
        """(tokens by (slot, generation), finished rows by slot, admitted rows)."""
        tokens, finished, admitted = {}, {}, []
        while len(finished) < count:
            batch = await self.read("step_batch")
            offset = 0
            rows = zip(batch.slots, batch.generations, batch.first_indices, batch.counts, strict=True)
            for slot, generation, first, length in rows:
                got = tokens.setdefault((slot, generation), [])
                assert first == len(got), "an index was skipped or repeated"
                got.extend(batch.token_ids[offset : offset + length])
                offset += length
            assert offset == len(batch.token_ids)
            finished.update({row.slot: row for row in batch.finished})
            admitted.extend(batch.admitted)
        return tokens, finished, admitted


def oracle(prompt, count):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]


def prompt_without_stop(count):
    """A prompt whose first ``count`` output tokens do not end it."""
    return next([i] for i in range(VOCAB) if STOP not in oracle([i], count))


@pytest.fixture
async def worker():
    runner = SlowRunner()
    scheduler = Scheduler(
        BlockPool(LIMITS.num_blocks), LIMITS.block_size, LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens
    )
    servicer = WorkerServicer("w0")
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    servicer.runner, servicer.scheduler, servicer.port = runner, scheduler, port
    servicer.begin = lambda: servicer.start(
        Engine(scheduler, runner), LIMITS, GrammarCompiler(VocabularyError("the fake has none"), VOCAB)
    )
    yield servicer
    await servicer.drain(0.1)
    await server.stop(None)


@asynccontextmanager
async def connected(worker):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        router = Router(worker_pb2_grpc.WorkerStub(channel).Connect())
        router.hello = await router.read("hello")
        yield router
        router.call.cancel()


async def at_rest(worker):
    """Waits until nothing runs; all blocks must be back."""
    for _ in range(200):
        if not worker._owners and worker.scheduler.pool.num_available == LIMITS.num_blocks:
            worker.scheduler.pool.check()
            return
        await asyncio.sleep(0.02)
    raise AssertionError("sequences or blocks were left behind")


async def test_hello_then_tokens_then_finish(worker):
    worker.begin()
    async with connected(worker) as router:
        hello = router.hello
        assert hello.protocol_version == 2
        assert hello.epoch != 0
        assert (hello.worker_id, hello.vocab_size, hello.block_size) == ("w0", VOCAB, 4)
        assert (hello.max_model_len, hello.max_slots) == (100, SLOTS)
        await router.credit()
        prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9]]
        for slot, prompt in enumerate(prompts):
            await router.submit(prompt, slot=slot, max_tokens=9)
        tokens, finished, admitted = await router.until_finished(3)
        for slot, prompt in enumerate(prompts):
            want = oracle(prompt, 9)
            assert tokens[slot, 1] == want
            row = finished[slot]
            stopped = want[-1] == STOP
            assert row.reason == (sampling_pb2.FINISH_REASON_STOP if stopped else sampling_pb2.FINISH_REASON_LENGTH)
            assert row.HasField("stop_token_id") == stopped
            assert row.usage.prompt_tokens == len(prompt)
            assert row.usage.completion_tokens == len(want)
        assert sorted((row.slot, row.cached_tokens) for row in admitted) == [(0, 0), (1, 4), (2, 0)]
    await at_rest(worker)


async def test_several_tokens_of_a_step_arrive_and_drafts_are_counted(worker):
    worker.scheduler.speculator = Speculator(Guesser(seed=1, accuracy=0.8), 4)
    worker.begin()
    prompt = prompt_without_stop(40)
    async with connected(worker) as router:
        await router.credit()
        await router.submit(prompt, max_tokens=40)
        tokens, batches = [], []
        while not batches or not batches[-1].finished:
            batches.append(await router.read("step_batch"))
            assert not batches[-1].first_indices or list(batches[-1].first_indices) == [len(tokens)]
            tokens += batches[-1].token_ids
        await at_rest(worker)
    assert tokens == oracle(prompt, 40)
    load = batches[-1].load
    assert 0 < load.accepted_tokens < load.draft_tokens
    assert load.accepted_tokens == 40 - batches[-1].step, "each accepted token saves a step"


async def test_before_the_model_is_loaded_the_stream_is_refused(worker):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await worker_pb2_grpc.WorkerStub(channel).Connect().read()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "loading" in error.value.details()
        assert LOADING[0] in tuple(error.value.trailing_metadata())


async def test_who_waits_while_the_model_is_loaded_is_let_in_then(worker, monkeypatch):
    monkeypatch.setattr("worker.server.LOADING_WAIT_S", 60.0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Connect()
        hello = asyncio.create_task(call.read())
        await asyncio.sleep(0.2)
        assert not hello.done()
        worker.begin()
        assert (await asyncio.wait_for(hello, 10)).hello.worker_id == "w0"
        call.cancel()


async def test_without_credit_everything_is_merged(worker):
    worker.begin()
    async with connected(worker) as router:
        prompt = prompt_without_stop(20)
        await router.submit(prompt, max_tokens=20)
        await router.send(ping=worker_pb2.Ping(nonce=7))
        assert (await router.read("pong")).nonce == 7
        await asyncio.wait_for(worker._idle.wait(), 10)
        await router.credit(1)
        batch = await router.read("step_batch")
        assert list(batch.counts) == [20]
        assert list(batch.token_ids) == oracle(prompt, 20)
        assert batch.finished[0].usage.completion_tokens == 20


async def test_a_cached_prefix_is_not_read_when_the_request_says_so(worker):
    worker.begin()
    async with connected(worker) as router:
        await router.credit()
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        for generation, skip, cached in (
            (1, True, 0),
            (2, True, 0),
            (3, False, 8),
        ):  # the first one's blocks are stored
            await router.submit(prompt, generation=generation, skip_reading_prefix_cache=skip)
            tokens, finished, admitted = await router.until_finished()
            assert [row.cached_tokens for row in admitted] == [cached]
            assert finished[0].usage.cached_tokens == cached
            assert tokens[0, generation] == oracle(prompt, 5)
    await at_rest(worker)


async def until_mirrored(worker, router, mirror):
    """Reads until the mirror has the pool's names; the engine must be idle."""
    while mirror.lost or mirror.names != set(worker.scheduler.pool.names()):
        mirror.apply(await router.read("kv_events"))


async def test_kv_events_tell_which_prefixes_are_cached(worker):
    worker.begin()
    async with connected(worker) as router, connected(worker) as deaf:
        mirror = PrefixMirror()
        await router.credit()

        async def run(*prompts):
            """Runs prompts; what comes of them goes to the mirror."""
            for slot, prompt in enumerate(prompts):
                run.generation += 1
                await router.submit(prompt, slot=slot, generation=run.generation, max_tokens=9)
            left = len(prompts)
            while left:
                message = await asyncio.wait_for(router.call.read(), 10)
                if message.WhichOneof("message") == "kv_events":
                    assert message.kv_events.epoch == router.hello.epoch
                    mirror.apply(message.kv_events)
                else:
                    left -= len(message.step_batch.finished)

        run.generation = 0
        await run([1, 2, 3, 4, 5])
        assert mirror.lost, "nobody asked"
        await router.send(subscribe_kv_events=worker_pb2.SubscribeKvEvents())
        await until_mirrored(worker, router, mirror)
        assert mirror.names == set(worker.scheduler.pool.names()) != set()
        for base in range(0, 40, 4):  # more than the pool holds: names come and go
            await run(*([base + number] * 60 for number in range(4)))
        await until_mirrored(worker, router, mirror)
        worker.scheduler.pool.clear_cache()  # nothing runs: the engine's thread does not look
        await run([7, 7, 7, 7, 7])
        await until_mirrored(worker, router, mirror)
        assert block_hashes(array("I", [7] * 4).tobytes(), 4)[0] in mirror.names
        await router.send(subscribe_kv_events=worker_pb2.SubscribeKvEvents())
        snapshot = await router.read("kv_events")
        assert snapshot.snapshot
        assert snapshot.sequence == mirror.sequence + 1
        assert split(snapshot.stored) == mirror.names
        await deaf.send(ping=worker_pb2.Ping(nonce=1))
        await deaf.read("pong")  # and nothing before it: only who asks is told
    await at_rest(worker)
    for _ in range(200):
        if worker.scheduler.pool._changes is None:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("changes are noted though nobody is left to hear of them")


async def test_a_router_that_reads_no_kv_events_loses_them_and_may_begin_anew(worker, monkeypatch):
    monkeypatch.setattr("worker.router_stream.MAX_NAMES", 6)
    worker.begin()
    async with connected(worker) as lazy, connected(worker) as busy:
        mirror = PrefixMirror()
        await lazy.send(subscribe_kv_events=worker_pb2.SubscribeKvEvents())
        await lazy.credit(1)
        mirror.apply(await lazy.read("kv_events"))
        assert not mirror.lost
        await busy.credit()
        for generation in (1, 2):
            await busy.submit([generation] * 40, generation=generation)
            await busy.until_finished()
        await lazy.credit()
        mirror.apply(await lazy.read("kv_events"))
        assert mirror.lost
        await lazy.send(subscribe_kv_events=worker_pb2.SubscribeKvEvents())
        await until_mirrored(worker, lazy, mirror)
        assert len(mirror.names) >= 20
    await at_rest(worker)


async def test_cancel_is_acknowledged_with_usage_and_frees_blocks(worker):
    worker.runner.delay = 0.02
    worker.begin()
    async with connected(worker) as router:
        await router.credit()
        await router.submit(prompt_without_stop(60), max_tokens=60)
        await router.read("step_batch")
        await router.send(cancel=worker_pb2.CancelSlot(slot=0, generation=2))  # another generation: nothing happens
        await router.send(cancel=worker_pb2.CancelSlot(slot=0, generation=1))
        while not (batch := await router.read("step_batch")).finished:
            pass
        (row,) = batch.finished
        assert row.reason == sampling_pb2.FINISH_REASON_CANCELLED
        assert 0 < row.usage.completion_tokens < 60
        await at_rest(worker)
        await router.submit([1], slot=0, generation=2, max_tokens=1)  # the slot may be used again
        _, finished, _ = await router.until_finished()
        assert finished[0].generation == 2


async def test_a_stream_that_ends_cancels_its_sequences_and_no_others(worker):
    worker.runner.delay = 0.01
    worker.begin()
    async with connected(worker) as stays:
        await stays.credit()
        prompt = prompt_without_stop(30)
        async with connected(worker) as leaves:
            await leaves.credit()
            await leaves.submit(prompt, max_tokens=90)
            await stays.submit(prompt, max_tokens=30)
            await leaves.read("step_batch")
        tokens, finished, _ = await stays.until_finished()
        assert tokens[0, 1] == oracle(prompt, 30)
        assert finished[0].reason == sampling_pb2.FINISH_REASON_LENGTH
    await at_rest(worker)


async def test_time_left_runs_out(worker):
    worker.runner.delay = 0.02
    worker.begin()
    async with connected(worker) as router:
        await router.credit()
        await router.submit(prompt_without_stop(90), max_tokens=90, time_left_ms=150)
        _, finished, _ = await router.until_finished()
        assert finished[0].reason == sampling_pb2.FINISH_REASON_DEADLINE
    await at_rest(worker)


SAMPLING = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "seed": 0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": b""}, "0 bytes"),
        ({"prompt_token_ids": b"12345"}, "5 bytes"),
        ({"prompt_token_ids": array("I", [VOCAB]).tobytes()}, "vocabulary"),
        ({"prompt_token_ids": array("I", [2**32 - 1]).tobytes()}, "vocabulary"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100}, "100"),
        ({"num_emitted": 1, "max_tokens": 1}, "num_emitted"),
        ({"num_emitted": 3}, "num_emitted"),
        ({"priority": -1}, "--scheduling-policy fcfs"),
        ({"slot": SLOTS}, "slot"),
        ({"sampling": sampling_pb2.SamplingParams()}, "sampling.temperature is missing"),
        ({"sampling": sampling_pb2.SamplingParams(**{**SAMPLING, "temperature": float("nan")})}, "temperature"),
        ({"sampling": sampling_pb2.SamplingParams(**{**SAMPLING, "top_p": 0})}, "top_p"),
        ({"sampling": sampling_pb2.SamplingParams(**{**SAMPLING, "min_p": 1.5})}, "min_p"),
    ],
)
async def test_bad_submits_are_rejected_and_hurt_nobody(worker, fields, message):
    worker.begin()
    async with connected(worker) as router:
        await router.credit()
        await router.submit([1, 2, 3], **fields)
        rejected = await router.read("rejected")
        assert rejected.reason == worker_pb2.Rejected.REASON_INVALID
        assert message in rejected.message
        await router.submit([1, 2, 3])
        tokens, _, _ = await router.until_finished()
        assert tokens[0, 1] == oracle([1, 2, 3], 5)


async def test_a_slot_in_use_and_an_old_generation_are_rejected(worker):
    worker.runner.delay = 0.01
    worker.begin()
    async with connected(worker) as router:
        await router.submit(prompt_without_stop(50), generation=5, max_tokens=50)
        await router.submit([1], generation=6)
        assert "in use" in (await router.read("rejected")).message
        await router.submit([1], generation=5)
        assert "not new" in (await router.read("rejected")).message


async def test_more_sequences_than_slots_are_rejected_as_full(worker):
    worker.runner.delay = 0.05
    worker.begin()
    async with connected(worker) as one, connected(worker) as two:
        for slot in range(SLOTS):
            await one.submit([slot], slot=slot, max_tokens=50)
        await one.send(ping=worker_pb2.Ping(nonce=1))
        await one.read("pong")
        await two.submit([1])
        assert (await two.read("rejected")).reason == worker_pb2.Rejected.REASON_FULL


async def test_pong_answers_while_a_step_runs(worker):
    worker.runner.delay = 0.5
    worker.begin()
    async with connected(worker) as router:
        await router.submit([1, 2])
        await asyncio.sleep(0.2)
        await router.send(ping=worker_pb2.Ping(nonce=3))
        pong = await router.read("pong")
        assert pong.nonce == 3
        assert pong.step_age_ms > 0


async def test_a_failing_step_ends_every_sequence_with_an_error(worker):
    worker.begin()
    async with connected(worker) as router:
        await router.credit()
        await router.submit(prompt_without_stop(90), max_tokens=90)
        await router.read("step_batch")
        worker.runner.fail = True
        while not (batch := await router.read("step_batch")).finished:
            pass
        (row,) = batch.finished
        assert row.reason == sampling_pb2.FINISH_REASON_ERROR
        assert row.error
        assert "secret" not in row.error
        assert worker.failed.is_set()
        await router.submit([1], slot=1)
        assert (await router.read("rejected")).reason == worker_pb2.Rejected.REASON_DRAINING


async def test_draining_finishes_what_runs_and_refuses_the_rest(worker):
    worker.runner.delay = 0.02
    worker.begin()
    async with connected(worker) as router:
        await router.credit()
        prompt = prompt_without_stop(20)
        await router.submit(prompt, max_tokens=20)
        await router.read("step_batch")
        draining = asyncio.create_task(worker.drain(10))
        await asyncio.sleep(0)
        await router.submit([1], slot=1)
        tokens = 1
        rejected = finished = False
        while (message := await asyncio.wait_for(router.call.read(), 10)) is not grpc.aio.EOF:
            if message.WhichOneof("message") == "rejected":
                rejected = message.rejected.reason == worker_pb2.Rejected.REASON_DRAINING
            else:
                tokens += len(message.step_batch.token_ids)
                finished = bool(message.step_batch.finished)
        await draining
        assert (tokens, rejected, finished) == (20, True, True)

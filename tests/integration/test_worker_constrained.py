"""Constrained sequences through the Worker service, on their way into an engine with a fake model."""

import asyncio

import grpc
import pytest

from protos import sampling_pb2, worker_pb2, worker_pb2_grpc
from tests.doubles.fake_runner import STOP, VOCAB
from tests.integration.test_worker_service import LIMITS, Router, SlowRunner
from worker.block_pool import BlockPool
from worker.engine import Engine
from worker.grammar import GrammarCompiler
from worker.scheduler import Scheduler
from worker.server import WorkerServicer
from worker.vocabulary import Vocabulary, VocabularyError

INVALID = worker_pb2.Rejected.REASON_INVALID


def resolved(**fields):
    return sampling_pb2.SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=0, **fields)


class Compiler(GrammarCompiler):
    """Compiles when it is allowed to."""

    def __init__(self, vocabulary) -> None:
        super().__init__(vocabulary, VOCAB)
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = 0

    async def automaton(self, constraint, output=()):
        self.asked += 1
        await self.gate.wait()
        return await super().automaton(constraint, output)


@pytest.fixture
async def worker(request):
    vocabulary = getattr(request, "param", Vocabulary([bytes([97 + index]) for index in range(26)], frozenset()))
    runner = SlowRunner()
    scheduler = Scheduler(
        BlockPool(LIMITS.num_blocks), LIMITS.block_size, LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens
    )
    servicer = WorkerServicer("w0")
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    servicer.grammars = Compiler(vocabulary)
    servicer.start(Engine(scheduler, runner), LIMITS, servicer.grammars)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        servicer.router = Router(worker_pb2_grpc.WorkerStub(channel).Connect())
        await servicer.router.read("hello")
        await servicer.router.credit()
        yield servicer
        servicer.router.call.cancel()
    await servicer.drain(5)
    assert not servicer._owners
    assert not servicer._compiling
    await server.stop(None)


async def test_a_wrong_grammar_is_refused_and_its_slot_is_free_again(worker):
    router = worker.router
    await router.submit([5], sampling=resolved(regex="(["))
    refused = await router.read("rejected")
    assert (refused.slot, refused.generation, refused.reason, refused.field) == (0, 1, INVALID, "sampling.regex")
    assert "unclosed" in refused.message
    await router.submit([5], generation=2)
    tokens, _, _ = await router.until_finished()
    assert tokens[0, 2]


@pytest.mark.parametrize("worker", [VocabularyError("/m has no tokenizer.json")], indirect=True)
async def test_without_a_vocabulary_it_says_so(worker):
    await worker.router.submit([5], sampling=resolved(json_object=True))
    refused = await worker.router.read("rejected")
    assert refused.message == "json_object needs the model's vocabulary: /m has no tokenizer.json"


async def test_an_earlier_attempts_output_must_fit(worker):
    await worker.router.submit([5, 1], num_emitted=1, sampling=resolved(regex="a+"))
    assert "output so far does not fit" in (await worker.router.read("rejected")).message


async def test_others_run_while_a_grammar_is_compiled(worker):
    router = worker.router
    worker.grammars.gate.clear()
    await router.submit([5], sampling=resolved(regex="a+"))
    await router.submit([6], slot=1)
    _, finished, _ = await router.until_finished()
    assert list(finished) == [1]
    await router.send(cancel=worker_pb2.CancelSlot(slot=0, generation=1))
    _, finished, admitted = await router.until_finished()
    assert finished[0].reason == sampling_pb2.FINISH_REASON_CANCELLED
    assert not admitted
    await router.submit([5], generation=2)
    assert (await router.until_finished())[1][0].reason != sampling_pb2.FINISH_REASON_CANCELLED


async def test_a_router_that_leaves_takes_what_is_compiled_with_it(worker):
    worker.grammars.gate.clear()
    await worker.router.submit([5], sampling=resolved(regex="a+"), stop_token_ids=[STOP])
    async with asyncio.timeout(5):
        while not worker.grammars.asked:
            await asyncio.sleep(0.01)
        worker.router.call.cancel()
        while worker._owners:
            await asyncio.sleep(0.01)

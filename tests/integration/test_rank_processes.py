"""A worker of two ranks as processes: it serves like any other, and whichever process is lost, none is left behind."""

import asyncio
import os
import re
import select
import signal
import sys
from array import array
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import sampling_pb2, worker_pb2, worker_pb2_grpc
from tests.doubles.tiny_model import VOCAB, save_tiny
from tests.integration.test_worker_process import ended, generate, running, start

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks into /proc, and parent-death signals are Linux's"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    return folder, save_tiny(folder)


class Process:
    """A process of which this test is not the parent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def kill(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def ended(self, seconds: float) -> bool:
        """Whether it ends within this time."""
        return bool(select.select([self._handle], [], [], seconds)[0])


def ranks(leader: int) -> list[Process]:
    """The other ranks of a worker."""
    children = [path.read_text().split() for path in Path(f"/proc/{leader}/task").glob("*/children")]
    return [Process(int(pid)) for pids in children for pid in pids]


async def first_rank(leader: int) -> Process:
    """Rank 1, as soon as its process exists."""
    for _ in range(3000):
        if found := ranks(leader):
            return found[0]
        await asyncio.sleep(0.01)
    raise AssertionError("no rank was started")


async def begin(channel):
    """A stream with a sequence that runs until something ends it."""
    call = worker_pb2_grpc.WorkerStub(channel).Connect()
    await call.read()
    await call.write(worker_pb2.RouterMessage(credit=worker_pb2.Credit(step_batches=10_000)))
    submit = worker_pb2.Submit(
        slot=0,
        generation=1,
        prompt_token_ids=array("I", [1]).tobytes(),
        sampling=sampling_pb2.SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=0),
        max_tokens=255,
    )
    await call.write(worker_pb2.RouterMessage(submit=submit))
    while not (await call.read()).step_batch.token_ids:
        pass
    return call


async def finish_reason(call) -> int:
    while True:
        message = await asyncio.wait_for(call.read(), 30)
        assert message is not grpc.aio.EOF, "the stream ended before the sequence did"
        if message.step_batch.finished:
            return message.step_batch.finished[0].reason


async def test_serves_the_model_and_ends_with_the_leader(model):
    folder, oracle = model
    prompt = torch.randint(0, VOCAB, (1, 40))
    expected = oracle.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, eos_token_id=None
    )
    async with running(folder, "--tensor-parallel-size", "2") as (process, channel):
        (rank,) = ranks(process.pid)
        # A service manager may send its signal to every process; those that run the model must not obey it.
        rank.kill(signal.SIGTERM)
        rank.kill(signal.SIGINT)
        assert await generate(channel, prompt[0].tolist(), 20) == expected[0, 40:].tolist()
        process.send_signal(signal.SIGTERM)
        status, log = await ended(process)
        assert rank.ended(0), "the leader ended before its rank"
    assert status == 0, log
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.mark.parametrize(("number", "word"), [(signal.SIGKILL, "killed"), (signal.SIGSTOP, "stopped")])
async def test_a_rank_lost_in_a_step_ends_the_worker(model, number, word):
    """Sequences hear of it, and the worker ends as one whose engine failed."""
    folder, _ = model
    async with running(folder, "--tensor-parallel-size", "2") as (process, channel):
        (rank,) = ranks(process.pid)
        call = await begin(channel)
        rank.kill(number)
        assert await finish_reason(call) == sampling_pb2.FINISH_REASON_ERROR
        assert rank.ended(10)
        status, log = await ended(process)
    assert status == 1
    assert re.search(rf"ERROR worker rank 1 \(process {rank.pid}\) was {word} by {number.name}", log), log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_lost_between_steps_ends_the_worker(model, number):
    """Nobody waits for a step that could fail; routers hear of it all the same."""
    folder, _ = model
    async with running(folder, "--tensor-parallel-size", "2") as (process, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="quire.v1.Worker"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        (rank,) = ranks(process.pid)
        rank.kill(number)
        assert (await asyncio.wait_for(watch.read(), 10)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        assert rank.ended(10)
        assert (await ended(process))[0] == 1


@pytest.mark.parametrize("stopped", [False, True])
async def test_ranks_do_not_outlive_their_leader(model, stopped):
    """Not even those that cannot run."""
    folder, _ = model
    async with running(folder, "--tensor-parallel-size", "2") as (process, _):
        (rank,) = ranks(process.pid)
        if stopped:
            process.send_signal(signal.SIGSTOP)  # else the leader would notice, and end it
            rank.kill(signal.SIGSTOP)
        process.kill()
        assert rank.ended(10)


async def test_a_rank_lost_while_loading_ends_the_start(model):
    folder, _ = model
    process = await start("--model", str(folder), "--port", "0", "--tensor-parallel-size", "2")
    rank = await first_rank(process.pid)
    rank.kill(signal.SIGKILL)
    status, log = await ended(process)
    assert status == 1
    assert f"rank 1 (process {rank.pid}) was killed by SIGKILL" in log.splitlines()[-1]
    assert "Traceback" not in log


async def test_a_stop_while_loading_leaves_no_rank(model):
    folder, _ = model
    process = await start("--model", str(folder), "--port", "0", "--tensor-parallel-size", "2")
    rank = await first_rank(process.pid)
    process.send_signal(signal.SIGTERM)
    assert (await ended(process))[0] == 0
    assert rank.ended(10)

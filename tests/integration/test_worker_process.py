"""``python -m worker`` as a process: ready, serving, and ending as it should."""

import asyncio
import os
import signal
import socket
import sys
from array import array
from contextlib import asynccontextmanager

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import sampling_pb2, worker_pb2, worker_pb2_grpc
from tests.doubles.tiny_model import VOCAB, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    return folder, save_tiny(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "worker",
        *flags,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


async def ended(process) -> tuple[int, str]:
    """(exit status, stderr)"""
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, stderr.decode()


@asynccontextmanager
async def running(folder, *flags: str):
    """A worker that is ready, and a channel to it."""
    port = free_port()
    process = await start("--model", str(folder), "--port", str(port), "--dtype", "float32",
                          "--kv-cache-memory-bytes", str(1 << 20), *flags)  # fmt: skip
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            async with asyncio.timeout(60):
                status = None
                while status != health_pb2.HealthCheckResponse.SERVING:
                    assert process.returncode is None, "the worker ended while starting"
                    try:
                        reply = await health.Check(health_pb2.HealthCheckRequest(service="quire.v1.Worker"))
                        status = reply.status
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.05)
            yield process, channel
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def generate(channel, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy output of one sequence."""
    call = worker_pb2_grpc.WorkerStub(channel).Connect()
    assert (await call.read()).hello.model == "tiny-llama"
    await call.write(worker_pb2.RouterMessage(credit=worker_pb2.Credit(step_batches=1000)))
    submit = worker_pb2.Submit(
        slot=0,
        generation=1,
        prompt_token_ids=array("I", prompt).tobytes(),
        sampling=sampling_pb2.SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=0),
        max_tokens=max_tokens,
    )
    await call.write(worker_pb2.RouterMessage(submit=submit))
    tokens: list[int] = []
    while True:
        batch = (await asyncio.wait_for(call.read(), 30)).step_batch
        tokens.extend(batch.token_ids)
        if batch.finished:
            call.cancel()
            return tokens


async def test_serves_the_model_and_stops_cleanly(model):
    folder, oracle = model
    prompt = torch.randint(0, VOCAB, (1, 40))
    mask = torch.ones_like(prompt)
    expected = oracle.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=20, eos_token_id=None)
    async with running(folder) as (process, channel):
        assert await generate(channel, prompt[0].tolist(), 20) == expected[0, 40:].tolist()
        process.send_signal(signal.SIGTERM)
        status, log = await ended(process)
    assert status == 0, log
    assert "Traceback" not in log


async def test_second_signal_ends_a_drain_at_once(model):
    folder, _ = model
    async with running(folder, "--shutdown-timeout", "60") as (process, channel):
        call = worker_pb2_grpc.WorkerStub(channel).Connect()
        await call.read()
        submit = worker_pb2.Submit(
            slot=0,
            generation=1,
            prompt_token_ids=array("I", [1]).tobytes(),
            sampling=sampling_pb2.SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=0),
            max_tokens=250,
        )
        # Without credit the sequence ends on the worker, but a stream of them keeps it busy.
        for generation in range(1, 200):
            submit.generation = generation
            submit.slot = generation % 64
            await call.write(worker_pb2.RouterMessage(submit=submit))
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        status, _ = await ended(process)
    assert status != 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel-size", "3"], "--tensor-parallel-size is 3"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size is 0"),
        (["--quantization", "gptq"], "--quantization gptq is not supported; use fp8 or awq"),
        (["--quantization", "awq"], "--quantization is awq, but"),
        (["--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype fp8_e5m2 is not supported; use auto"),
        (["--max-model-len", "100000"], "--max-model-len is 100000"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--block-size", "12"], "--block-size is 12"),
        (["--max-num-batched-tokens", "4", "--max-num-seqs", "8"], "--max-num-batched-tokens is 4"),
    ],
)
async def test_impossible_settings_end_with_one_clear_line(model, flags, message):
    folder, _ = model
    status, log = await ended(await start("--model", str(folder), "--port", "0", *flags))
    assert status == 1
    assert message in log.splitlines()[-1]
    assert "Traceback" not in log


async def test_the_specified_deployment_line_is_understood(model):
    folder, _ = model
    line = "--tensor-parallel-size 4 --gpu-memory-utilization 0.92 --max-model-len 8192 --enable-prefix-caching"
    flags = [*line.split(), "--quantization", "fp8", "--dtype", "float16"]
    status, log = await ended(await start("--model", str(folder), *flags))
    assert status == 1
    assert "--max-model-len is 8192, but" in log, "all but the test model's length fits"


async def test_missing_model_and_busy_port(model, tmp_path):
    folder, _ = model
    status, log = await ended(await start("--model", str(tmp_path / "nowhere"), "--port", "0"))
    assert (status, "neither a model folder" in log, "Traceback" in log) == (1, True, False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, log = await ended(await start("--model", str(folder), "--port", str(port)))
        assert (status, str(port) in log, "Traceback" in log) == (1, True, False)

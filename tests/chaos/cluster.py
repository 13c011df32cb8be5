"""A router and workers as processes of their own, each worker behind a proxy; ended with the test."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import grpc

from protos import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.chaos.history import WorkerAtRest
from tests.chaos.proxy import Proxy
from tests.doubles.processes import free_port

ROOT = Path(__file__).resolve().parents[2]


def spawn(log: TextIO, module: str, *args: str) -> "subprocess.Popen[bytes]":
    """A Python process of this tree, whose output goes to a file."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", module, *args], env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
    )


class WorkerProcess:
    """A worker that comes back on the same port, as often as it is started."""

    def __init__(self, number: int, step_s: float, log: TextIO) -> None:
        self.number = number
        self.port = free_port()
        self.proxy = Proxy(self.port)
        self._step_s = step_s
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def status(self) -> int | None:
        """The process's exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        assert self._process is None or self._process.poll() is not None
        self._process = spawn(self._log, "tests.chaos.scripted_engine", str(self.port), str(self._step_s))

    async def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def end(self) -> int:
        """SIGTERM, and what the process says in its last hour. Returns its exit status."""
        assert self._process is not None
        self._process.terminate()
        return await asyncio.to_thread(self._process.wait, 60)

    def pause(self) -> None:
        """SIGSTOP: it holds its connections and does nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def at_rest(self) -> WorkerAtRest:
        """What it holds by its own account, past proxy and router."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Connect(timeout=10)
            hello = (await call.read()).hello
            await call.write(worker_pb2.RouterMessage(ping=worker_pb2.Ping(nonce=1)))
            load = (await call.read()).pong.load
            call.cancel()
        return WorkerAtRest(
            f"worker {self.number}", load.running, load.waiting, load.free_blocks + load.cached_blocks, hello.num_blocks
        )


class Cluster:
    """Used as an async context manager; ``log`` receives what all processes say."""

    def __init__(self, model: Path, num_workers: int, log: TextIO, step_s: float = 0.02, *router_flags: str) -> None:
        self.workers = [WorkerProcess(number, step_s, log) for number in range(num_workers)]
        self._model = model
        self._log = log
        self._router_flags = router_flags
        self._router: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> "Cluster":
        for worker in self.workers:
            await worker.proxy.start()
            worker.start()
        port = free_port()
        self._router = spawn(
            self._log, "router", "--model", str(self._model), "--served-model-name", "model", "--port", str(port),
            "--worker-urls", *(f"127.0.0.1:{worker.proxy.port}" for worker in self.workers), *self._router_flags,
        )  # fmt: skip
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)
        await self.until_ready(len(self.workers))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.channel.close()
        if self._router is not None:
            self._router.terminate()
            await asyncio.to_thread(self._router.wait, 60)
        for worker in self.workers:
            await worker.kill()
            await worker.proxy.close()

    async def ready_workers(self) -> int:
        """How many workers the router gives work to."""
        try:
            request = inference_pb2.GetModelRequest(model="model")
            return (await self.stub.GetModel(request, timeout=10, wait_for_ready=True)).ready_workers
        except grpc.aio.AioRpcError:
            return 0

    async def until_ready(self, count: int, seconds: float = 60.0) -> None:
        """Waits until the router has at least that many workers."""
        async with asyncio.timeout(seconds):
            while await self.ready_workers() < count:
                await asyncio.sleep(0.05)

    async def at_rest(self, seconds: float = 5.0) -> list[WorkerAtRest]:
        """What all workers hold, once they say that they hold nothing, or when the time is over."""
        found: list[WorkerAtRest] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not found or any(one.unreferenced_blocks < one.num_blocks for one in found):
                    found = [await worker.at_rest() for worker in self.workers]
                    await asyncio.sleep(0.1)
        return found

    def router_memory(self) -> int:
        """Bytes of the router that are resident."""
        assert self._router is not None
        return int(Path(f"/proc/{self._router.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def router_at_rest(self) -> list[str]:
        """What the router still holds; empty: nothing."""
        request = inference_pb2.ExplainRequest(model="model", token_ids=inference_pb2.TokenIds(ids=[1000]))
        explained = await self.stub.Explain(request, timeout=10)
        held = [f"{one.worker} has {one.running} sequences" for one in explained.candidates if one.running]
        return held + ([f"{explained.queued} requests wait"] if explained.queued else [])

"""A router in this process, with a client: what the router's integration tests start from."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from protos import inference_pb2, inference_pb2_grpc
from protos.tracing import Tracing
from router.__main__ import SERVICE, Router, make_front
from router.config import RouterConfig
from router.tokenizer import Tokenizer
from tests.integration.fake_worker import FakeWorker

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Client:
    """Calls a router."""

    def __init__(self, router: Router, address: str, channel: grpc.aio.Channel) -> None:
        self.router = router
        self.address = address
        self.channel = channel
        self.stub = inference_pb2_grpc.InferenceStub(channel)

    async def health(self, service: str = SERVICE) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(self.channel).Check(request)).status

    async def until_ready(self, workers: int = 1) -> None:
        """Waits until that many workers are ready."""
        wanted = SERVING if workers else NOT_SERVING
        async with asyncio.timeout(20):
            while True:
                if (await self.model()).ready_workers == workers and await self.health() == wanted:
                    return
                await asyncio.sleep(0.01)

    async def model(self) -> inference_pb2.Model:
        return await self.stub.GetModel(inference_pb2.GetModelRequest(model="demo"))

    def call(self, timeout: float | None = 30, metadata: Sequence[tuple[str, str]] = (), **fields: Any) -> "EventCall":
        """A Generate call under way."""
        prompt = {} if {"token_ids", "chat", "text"} & set(fields) else {"text": "Once upon a time"}
        request = inference_pb2.GenerateRequest(**{"model": "demo", **prompt, **fields})
        return EventCall(self.stub.Generate(request, timeout=timeout, metadata=metadata))

    async def generate(self, **fields: Any) -> "Answer":
        """A whole Generate call."""
        answer = Answer()
        async for event in self.call(**fields):
            answer.add(event)
        return answer

    async def until_running(self, count: int) -> None:
        """Waits until Explain counts that many sequences on workers."""
        await self.until_explained(lambda explained: sum(c.running for c in explained.candidates) == count)

    async def until_explained(self, condition: Callable[[inference_pb2.ExplainResponse], bool]) -> None:
        """Waits until what Explain says makes a condition true."""
        async with asyncio.timeout(20):
            while True:
                if condition(await self.explain()):
                    return
                await asyncio.sleep(0.01)

    async def explain(self) -> inference_pb2.ExplainResponse:
        return await self.stub.Explain(inference_pb2.ExplainRequest(model="demo", text="Hello"))


class EventCall:
    """A Generate call, event by event, however they come together in messages. ``messages`` counts these."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._read: deque[inference_pb2.GenerateEvent] = deque()
        self.messages = 0
        self.cancel = call.cancel
        self.code = call.code
        self.initial_metadata = call.initial_metadata
        self.trailing_metadata = call.trailing_metadata

    async def read(self) -> Any:
        """The next event, or EOF."""
        while not self._read:
            response = await self._call.read()
            if response is grpc.aio.EOF:
                return response
            self.messages += 1
            self._read.extend(response.events)
        return self._read.popleft()

    async def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateEvent]:
        while (event := await self.read()) is not grpc.aio.EOF:
            yield event


class Answer:
    """What came of a Generate call."""

    def __init__(self) -> None:
        self.started: list[inference_pb2.Started] = []
        self.deltas: list[inference_pb2.Delta] = []
        self.finished: dict[int, inference_pb2.Finished] = {}

    def add(self, event: inference_pb2.GenerateEvent) -> None:
        """Checks the order that the schema promises."""
        match event.WhichOneof("event"):
            case "started":
                assert not self.started
                self.started.append(event.started)
            case "delta":
                assert self.started
                assert event.delta.index not in self.finished
                self.deltas.append(event.delta)
            case "finished":
                assert event.finished.index not in self.finished
                self.finished[event.finished.index] = event.finished

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def ids(self, index: int = 0) -> list[int]:
        """The ids of a choice; their indices must go on without a gap."""
        ids: list[int] = []
        for delta in self.deltas:
            if delta.index == index:
                assert delta.first_index == len(ids)
                ids.extend(delta.token_ids)
        return ids


@asynccontextmanager
async def running_router(
    tokenizer: Tokenizer, *workers: FakeWorker | str, tracing: Tracing | None = None, **settings: Any
) -> AsyncIterator[Client]:
    """A router in front of running workers (or addresses), and a client of it."""
    addresses = tuple(worker if isinstance(worker, str) else worker.address for worker in workers)
    config = RouterConfig(Path("demo"), addresses, **{"port": 0, "served_model_name": ("demo", "alias"), **settings})
    server = make_front(config)
    port = server.add_insecure_port("127.0.0.1:0")
    router = Router(config, tokenizer, server, tracing=tracing)
    await router.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            client = Client(router, f"127.0.0.1:{port}", channel)
            if any(isinstance(worker, FakeWorker) for worker in workers):
                await client.until_ready(sum(isinstance(worker, FakeWorker) for worker in workers))
            yield client
    finally:
        await router.stop(0)


class Failure:
    """The status of a call that failed, taken apart."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        self.field = self.reason = ""
        self.retry_s = 0
        status = rpc_status.from_call(error)
        for packed in status.details if status is not None else ():
            bad, info, retry = (
                error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(),
            )  # fmt: skip
            if packed.Unpack(bad):
                self.field = bad.field_violations[0].field
            elif packed.Unpack(info):
                self.reason = info.reason
                assert info.domain == "quire"
            elif packed.Unpack(retry):
                self.retry_s = retry.retry_delay.seconds


async def failure(awaitable: Any) -> Failure:
    """The failure of a call that must fail."""
    try:
        await awaitable
    except grpc.aio.AioRpcError as error:
        return Failure(error)
    raise AssertionError("the call did not fail")

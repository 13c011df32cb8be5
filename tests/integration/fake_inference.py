"""A router of a few lines: the ``Inference`` service with replies that tests choose, over a real socket.

The reply's tokens are ``w0 w1 w2 …``, ``max_tokens`` of them. What else happens is scripted in ``FakeInference``.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvicorn
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_status import rpc_status

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.listener import listen
from protos import inference_pb2, inference_pb2_grpc, sampling_pb2
from protos.channel import SERVER_OPTIONS

MODEL = "org/tiny"
SERVICE = "quire.v1.Inference"
MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class Failure:
    """A status to answer with."""

    code: grpc.StatusCode
    message: str = "scripted"
    details: tuple[Message, ...] = ()

    def rich(self) -> Any:
        packed = []
        for detail in self.details:
            any_ = any_pb2.Any()
            any_.Pack(detail)
            packed.append(any_)
        return rpc_status.to_status(status_pb2.Status(code=self.code.value[0], message=self.message, details=packed))


def bad_request(field_name: str) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[error_details_pb2.BadRequest.FieldViolation(field=field_name, description="wrong")]
    )


def retry_after(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(int(seconds * 1000))
    return error_details_pb2.RetryInfo(retry_delay=delay)


@dataclass
class FakeInference(inference_pb2_grpc.InferenceServicer):
    """The service and what it was asked. Tests set the first block and read the second."""

    # Answer Generate with this, before or after Started.
    refusal: Failure | None = None
    failure_after_tokens: tuple[int, Failure] | None = None
    # Events to send in place of the usual ones.
    script: list[inference_pb2.GenerateEvent] | None = None
    # Whether more may come after them.
    stays_open: bool = False
    # Wait for this long before Started, and before each token; seconds.
    delay_start: float = 0.0
    delay_token: float = 0.0
    # Token i waits until gate i is set.
    gates: list[threading.Event] = field(default_factory=list)
    words: list[str] | None = None
    cached_tokens: int = 0
    # What the model's chat template acts on.
    chat_template: inference_pb2.ChatTemplate | None = None
    takes_priorities: bool = False
    stop_string: str = ""
    # Whether it has a model of whatever name.
    any_model: bool = False
    load: inference_pb2.GetLoadResponse = field(default_factory=inference_pb2.GetLoadResponse)
    # In Started, and the metadata with the status.
    route: inference_pb2.Route | None = None
    route_at_end: tuple[tuple[str, str], ...] = ()

    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    time_left: list[float] = field(default_factory=list)
    calls: list[Message] = field(default_factory=list)
    cancelled: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def reset(self) -> None:
        """Forgets the script and what was asked."""
        vars(self).update(vars(type(self)()))

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.time_left.append(context.time_remaining())
        try:
            async for event in self._events(request, context):
                yield inference_pb2.GenerateResponse(events=[event])
        # The second comes where the call was cancelled while an event was being sent.
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.release()
            raise

    async def _events(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        await asyncio.sleep(self.delay_start)
        if request.model != MODEL and not self.any_model:
            info = error_details_pb2.ErrorInfo(reason="MODEL_NOT_FOUND", domain="quire")
            message = f"the model {request.model!r} is not served"
            await context.abort_with_status(Failure(grpc.StatusCode.NOT_FOUND, message, (info,)).rich())
        if self.refusal is not None:
            await context.abort_with_status(self.refusal.rich())
        if self.script is not None:
            for event in self.script:
                yield event
            await asyncio.sleep(30 if self.stays_open else 0)
            return
        prompt_tokens = _prompt_tokens(request)
        context.set_trailing_metadata(self.route_at_end)
        yield inference_pb2.GenerateEvent(
            started=inference_pb2.Started(
                request_id=request.request_id, model=request.model, prompt_tokens=prompt_tokens, route=self.route
            )
        )
        words = self._words(request)
        n = request.n or 1
        if request.output.final_only:
            for index in range(n):
                yield _delta(index, *words, request=request)
        else:
            for place, word in enumerate(words):
                await asyncio.sleep(self.delay_token)
                if place < len(self.gates):
                    await asyncio.to_thread(self.gates[place].wait, 20)
                if self.failure_after_tokens is not None and place == self.failure_after_tokens[0]:
                    await context.abort_with_status(self.failure_after_tokens[1].rich())
                for index in range(n):
                    yield _delta(index, word, request=request)
        for index in range(n):
            finished = inference_pb2.Finished(
                index=index,
                reason=sampling_pb2.FINISH_REASON_STOP if self.stop_string else sampling_pb2.FINISH_REASON_LENGTH,
                usage=sampling_pb2.Usage(
                    prompt_tokens=prompt_tokens,
                    completion_tokens=len(words),
                    cached_tokens=self.cached_tokens + index,
                ),
            )
            if self.stop_string:
                finished.stop_string = self.stop_string
            yield inference_pb2.GenerateEvent(finished=finished)

    def _words(self, request: inference_pb2.GenerateRequest) -> list[str]:
        if self.words is not None:
            return self.words
        limit = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else 4
        return [f"w{place} " for place in range(limit)]

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        self.calls.append(request)
        if self.refusal is not None:
            await context.abort_with_status(self.refusal.rich())
        text = request.text or "".join(turn.content for turn in request.chat.messages)
        return inference_pb2.TokenizeResponse(token_ids=list(text.encode()), max_model_len=MAX_MODEL_LEN)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        self.calls.append(request)
        if self.refusal is not None:
            await context.abort_with_status(self.refusal.rich())
        return inference_pb2.DetokenizeResponse(
            text=bytes(token % 256 for token in request.token_ids).decode(errors="replace")
        )

    async def GetMetrics(
        self, request: inference_pb2.GetMetricsRequest, context: Any
    ) -> inference_pb2.GetMetricsResponse:
        if self.refusal is not None:
            await context.abort_with_status(self.refusal.rich())
        return inference_pb2.GetMetricsResponse(text=b"quire_router_num_requests_waiting 3.0\n")

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[self._model()])

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Any) -> inference_pb2.Model:
        if request.model != MODEL and not self.any_model:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"the model {request.model!r} is not served")
        return self._model()

    async def GetLoad(self, request: inference_pb2.GetLoadRequest, context: Any) -> inference_pb2.GetLoadResponse:
        if self.refusal is not None:
            await context.abort_with_status(self.refusal.rich())
        return self.load

    def _model(self) -> inference_pb2.Model:
        return inference_pb2.Model(
            name=MODEL,
            max_model_len=MAX_MODEL_LEN,
            created=1_700_000_000,
            ready_workers=1,
            chat_template=self.chat_template,
            takes_priorities=self.takes_priorities,
        )


def _delta(index: int, *words: str, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateEvent:
    """Each word is a token, whose id means nothing."""
    delta = inference_pb2.Delta(index=index, text="".join(words))
    if request.output.token_ids or request.output.token_bytes:
        delta.token_ids.extend([7] * len(words))
    if request.output.token_bytes:
        delta.token_bytes.extend(word.encode() for word in words)
    return inference_pb2.GenerateEvent(delta=delta)


def _prompt_tokens(request: inference_pb2.GenerateRequest) -> int:
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return len(request.token_ids.ids)
    if kind == "text":
        return len(request.text.split())
    return sum(len(turn.content.split()) + 1 for turn in request.chat.messages)


@dataclass
class Stack:
    """A gateway before a fake router, both running in a thread."""

    fake: FakeInference
    # Where the fake router listens.
    router: str
    url: str
    app: Any
    loop: asyncio.AbstractEventLoop
    health: Any

    def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        asyncio.run_coroutine_threadsafe(self.health.set(SERVICE, status), self.loop).result(10)


@contextlib.asynccontextmanager
async def fake_router(fake: FakeInference, port: int = 0) -> AsyncIterator[tuple[str, Any]]:
    """Serves ``fake``; gives its address and its health servicer."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(fake, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", health
    finally:
        await server.stop(0)


@contextlib.contextmanager
def running_stack(fake: FakeInference, router: str | None = None, **settings: Any) -> Iterator[Stack]:
    """Runs a gateway with these settings; with ``router`` it is put before that address and not before ``fake``."""
    ready = threading.Event()
    box: list[Stack] = []
    stop: list[Any] = []
    failure: list[BaseException] = []

    async def serve() -> None:
        async with fake_router(fake) as (address, health):
            app = create_app(GatewayConfig(port=0, router=router or address, **settings))
            listener = listen("127.0.0.1", 0)
            server = uvicorn.Server(
                uvicorn.Config(app, log_config=None, lifespan="on", ws="none", timeout_graceful_shutdown=5)
            )
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            box.append(Stack(fake, address, url, app, asyncio.get_running_loop(), health))
            stop.append(server)
            ready.set()
            await serving

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(20)
        assert not failure, failure
        yield box[0]
    finally:
        if stop:
            stop[0].should_exit = True
        thread.join(20)
        assert not thread.is_alive()

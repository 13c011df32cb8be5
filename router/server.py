"""Serves the Inference service: each method from its request to its answer."""

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator
from typing import Any

from grpc.aio import ServicerContext

from protos import inference_pb2, inference_pb2_grpc
from protos.tracing import NO_SPAN, Span, Tracing, carrier_of
from router.access import hold_to_key, may_cancel
from router.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ModelNotFound,
    RequestCancelled,
    RequestError,
    RequestExists,
    Unavailable,
    answers_errors,
)
from router.events import RouterEvents
from router.fleet import Fleet, ModelLimits
from router.load_report import LoadReporter
from router.metrics import RouterCollector
from router.prompt_encoder import PromptEncoder
from router.recovery import Recovery
from router.request import Request, pack_ids
from router.request_trace import RequestTrace
from router.scheduler import Scheduler
from router.tokenizer import Tokenizer
from router.validation import (
    check_generate,
    check_ids,
    check_prompt_logprobs,
    check_tokens_left,
    resolve_max_tokens,
)

logger = logging.getLogger(__name__)

Context = ServicerContext[Any, Any]

_CANCELLED = inference_pb2.CancelResponse.OUTCOME_CANCELLED
_NOT_FOUND = inference_pb2.CancelResponse.OUTCOME_NOT_FOUND
_MAX_NAME_CHARS = 100
# Events that go together whatever their size, and what more of them may come to. A Delta is at most a few MiB.
_FEW_EVENTS = 3
_MESSAGE_BYTES = 1 << 20


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """All public calls.

    Args:
        names: the model's names; the first is the one that answers carry.
        tokenizer, encoder: the model's.
        fleet: its workers.
        scheduler: takes requests from here on.
        recovery: knows which prompts are kept from workers.
        reporter, collector: know who waits and what workers are busy with.
        events: are counted.
        max_unsent_bytes: of a stream, about; a client that is further behind has its stream paused.
        tracing: records Generate calls.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        fleet: Fleet,
        scheduler: Scheduler,
        recovery: Recovery,
        reporter: LoadReporter,
        collector: RouterCollector,
        events: RouterEvents,
        max_unsent_bytes: int,
        tracing: Tracing,
    ) -> None:
        self._tracing = tracing
        self._names = names
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._scheduler = scheduler
        self._recovery = recovery
        self._reporter = reporter
        self._collector = collector
        self._events = events
        self._max_unsent_bytes = max_unsent_bytes
        self._encoder = encoder
        self._created = int(time.time())
        self._running: dict[str, Request] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, grace: float) -> None:
        """Refuses new requests, gives running ones ``grace`` seconds, then fails what is left."""
        self._draining = True
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d requests still ran after %g s and were cut off", len(self._running), grace)
        for request in self._running.values():
            request.fail(Unavailable("the router is shutting down; send the request again"))

    # ---- Generate ----

    @answers_errors
    async def Generate(self, message: inference_pb2.GenerateRequest, context: Context) -> None:
        """One request, from its prompt to the last token."""
        span = NO_SPAN
        if self._tracing.enabled:
            span = self._tracing.start("Generate", carrier_of(context.invocation_metadata() or ()))
            span.set({"rpc.system": "grpc", "rpc.service": "quire.v1.Inference", "rpc.method": "Generate"})
        try:
            await self._generate(message, context, span)
        except Exception as error:
            self._events.failures.labels(_kind_of(error)).inc()
            span.fail(_kind_of(error))
            raise
        except asyncio.CancelledError:
            span.fail("cancelled")
            raise
        finally:
            span.end()

    async def _generate(self, message: inference_pb2.GenerateRequest, context: Context, span: Span) -> None:
        if self._draining:
            raise Unavailable("the router is shutting down; send the request again")
        self._check_model(message.model)
        hold_to_key(message)
        limits = self._limits()
        params = check_generate(message, self._tokenizer.eos_token_ids, limits.vocab_size, limits.takes_priorities)
        request_id = message.request_id or f"gen-{uuid.uuid4().hex}"
        if request_id in self._running:
            raise RequestExists(f"a running request has the id {request_id!r}")
        loop = asyncio.get_running_loop()
        time_left = context.time_remaining()
        deadline = None if time_left is None else loop.time() + time_left
        request = Request(request_id, params, deadline, self._max_unsent_bytes, RequestTrace(span))
        timer = None
        if deadline is not None:
            timer = loop.call_at(deadline, request.fail, DeadlineExceeded("the deadline passed"))
        self._running[request_id] = request
        self._idle.clear()
        try:
            field, token_ids = await self._encoder.encode(message, limits.max_model_len, limits.vocab_size)
            if request.failure is not None:
                raise request.failure
            check_prompt_logprobs(params, len(token_ids))
            max_tokens = resolve_max_tokens(field, len(token_ids), params.max_tokens, self._limits().max_model_len)
            if params.bad_words:
                request.bad_word_ids = await self._encoder.encode_words(params.bad_words)
            check_tokens_left(params, request.bad_word_ids)
            request.begin(token_ids, max_tokens, self._tokenizer.token_bytes)
            request.trace.tokenized(request)
            self._recovery.check(request)
            self._scheduler.start(request)
            await self._answer(request, context)
        finally:
            if timer is not None:
                timer.cancel()
            self._scheduler.end(request)
            self._recovery.discard(request)
            request.trace.ended(request, _kind_of(request.failure))
            del self._running[request_id]
            if not self._running:
                self._idle.set()

    async def _answer(self, request: Request, context: Context) -> None:
        """Sends what there is whenever the client can take more: what comes meanwhile waits and goes out together."""
        # Until a worker runs it, it may yet be refused: for want of room, or for a grammar that cannot be followed.
        await request.begun.wait()
        if request.failure is not None:
            raise request.failure
        started = inference_pb2.Started(
            request_id=request.id,
            model=request.params.model,
            prompt_tokens=request.prompt_tokens,
            route=None if request.route is None else request.route.begun(),
        )
        events = [inference_pb2.GenerateEvent(started=started)]
        while True:
            request.changed.clear()
            events += request.take_unsent()
            for together in in_messages(events):
                await context.write(inference_pb2.GenerateResponse(events=together))
            events = []
            self._scheduler.resume(request)
            if request.failure is not None:
                raise request.failure
            if request.ended and not request.changed.is_set():
                if request.route is not None:
                    context.set_trailing_metadata(request.route.ended())
                return
            await request.changed.wait()

    @answers_errors
    async def Cancel(self, message: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        """Cancels running requests by id."""
        response = inference_pb2.CancelResponse()
        for request_id in message.request_ids:
            request = self._running.get(request_id)
            if request is None or request.ended or not may_cancel(request.params.tenant):
                response.results.add(request_id=request_id, outcome=_NOT_FOUND)
            else:
                request.fail(RequestCancelled("the request was cancelled"))
                response.results.add(request_id=request_id, outcome=_CANCELLED, usage=request.usage())
        return response

    # ---- text and ids ----

    @answers_errors
    async def Tokenize(
        self, message: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Text or chat to ids."""
        self._check_model(message.model)
        limits = self._fleet.limits
        special = message.add_special_tokens if message.HasField("add_special_tokens") else True
        _, token_ids = await self._encoder.encode(message, 0, self._vocab_size(), add_special_tokens=special)
        return inference_pb2.TokenizeResponse(
            token_ids=token_ids, max_model_len=limits.max_model_len if limits is not None else 0
        )

    @answers_errors
    async def Detokenize(
        self, message: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Ids to text, control tokens included."""
        self._check_model(message.model)
        token_ids = list(message.token_ids)
        check_ids("token_ids", token_ids, self._vocab_size())
        return inference_pb2.DetokenizeResponse(text=await self._encoder.decode(token_ids))

    def _vocab_size(self) -> int:
        limits = self._fleet.limits
        return max(self._tokenizer.vocab_size, limits.vocab_size if limits is not None else 0)

    # ---- what there is ----

    @answers_errors
    async def ListModels(
        self, message: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """All names of the model."""
        return inference_pb2.ListModelsResponse(models=[self._model(name) for name in self._names])

    @answers_errors
    async def GetModel(self, message: inference_pb2.GetModelRequest, context: Context) -> inference_pb2.Model:
        """The model by one of its names."""
        self._check_model(message.model)
        return self._model(message.model)

    def _model(self, name: str) -> inference_pb2.Model:
        limits, ready = self._fleet.limits, self._fleet.ready_count
        return inference_pb2.Model(
            name=name,
            max_model_len=limits.max_model_len if limits is not None and ready else 0,
            created=self._created,
            ready_workers=ready,
            takes_priorities=limits is not None and limits.takes_priorities,
            chat_template=_template_of(self._tokenizer),
        )

    @answers_errors
    async def Explain(self, message: inference_pb2.ExplainRequest, context: Context) -> inference_pb2.ExplainResponse:
        """What Generate would do now."""
        self._check_model(message.model)
        limits = self._limits()
        field, token_ids = await self._encoder.encode(message, limits.max_model_len, limits.vocab_size)
        resolve_max_tokens(field, len(token_ids), None, limits.max_model_len)
        return self._scheduler.explain(pack_ids(token_ids), message.cache_salt.encode(), message.session_id.encode())

    @answers_errors
    async def GetLoad(self, message: inference_pb2.GetLoadRequest, context: Context) -> inference_pb2.GetLoadResponse:
        """Who waits, and what workers are busy with."""
        return self._reporter.report()

    @answers_errors
    async def GetMetrics(
        self, message: inference_pb2.GetMetricsRequest, context: Context
    ) -> inference_pb2.GetMetricsResponse:
        """The same for Prometheus; with many workers it is long, and made on a thread."""
        return inference_pb2.GetMetricsResponse(text=await asyncio.to_thread(self._collector.expose))

    # ---- checks ----

    def _check_model(self, name: str) -> None:
        if not name:
            raise InvalidArgument("model", f"model is empty; it must name a model, say {self._names[0]!r}")
        if name not in self._names:
            raise ModelNotFound(f"the model {name[:_MAX_NAME_CHARS]!r} does not exist; there is {self._names[0]!r}")

    def _limits(self) -> ModelLimits:
        """Raises Unavailable when no worker could run a request."""
        limits = self._fleet.limits
        if limits is None or not self._fleet.ready_count:
            raise Unavailable("no worker is ready to run the model; try again shortly")
        return limits


def _kind_of(error: Exception | None) -> str:
    """The kind of a failure, for metrics and traces; empty: none."""
    if error is None:
        return ""
    return (error.reason or error.code.name if isinstance(error, RequestError) else "internal").lower()


def in_messages(events: list[inference_pb2.GenerateEvent]) -> Iterator[list[inference_pb2.GenerateEvent]]:
    """Events by message: all in one, since each costs more than what is in it, unless they are large."""
    if len(events) <= _FEW_EVENTS:
        if events:
            yield events
        return
    together: list[inference_pb2.GenerateEvent] = []
    size = 0
    for event in events:
        length = event.ByteSize()
        if together and size + length > _MESSAGE_BYTES:
            yield together
            together, size = [], 0
        together.append(event)
        size += length
    yield together


def _template_of(tokenizer: Tokenizer) -> inference_pb2.ChatTemplate | None:
    template = tokenizer.chat_template
    if template is None:
        return None
    return inference_pb2.ChatTemplate(
        takes_tools=template.takes_tools,
        tool_call_format=template.tool_call_format,
        variables=sorted(template.variables),
    )

"""The Generate calls of one HTTP request, as one stream of pieces that is checked, counted and always ended.

Knows the wire and nothing of HTTP or of OpenAI's objects, apart from the errors it raises.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc

from gateway.errors import CLIENT_CLOSED_REQUEST, SERVER_ERROR, ApiError, ClientGone, ParamOf, from_rpc, internal
from gateway.genai_attributes import of_response
from gateway.logprobs import TokenLogprob, tokens_of
from gateway.metrics import Metrics
from gateway.reasoning import ReasoningTokens
from gateway.replies import FinishReason
from protos import inference_pb2, inference_pb2_grpc, sampling_pb2
from protos.tracing import NO_SPAN, Span

logger = logging.getLogger("gateway")

# Events that one request with several prompts holds while its client is slow; gRPC's flow control holds the rest back.
_MAX_QUEUED_EVENTS = 64

# The router's metadata that clients get as headers. A stream's headers are sent before the last one is known.
ROUTE_HEADERS = (
    "x-quire-worker", "x-quire-reason", "x-quire-predicted-cached-tokens", "x-quire-cached-tokens", "x-quire-queue-ms",
    "x-quire-prefill-ms", "x-quire-moves",
)  # fmt: skip

_REASONS: dict[int, FinishReason] = {
    sampling_pb2.FINISH_REASON_STOP: "stop",
    sampling_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True)
class Ending:
    """How a choice ended. ``stop_reason`` is the stop string or token id that was met, if any."""

    reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True)
class Piece:
    """Something new of one choice: text and log-probabilities, or how it ended.

    Attributes:
        index: of the choice.
        tokens: of the text, when log-probabilities were asked for; the last ones may still lack their text, which is
            held back until a character is whole or a stop string is ruled out.
        of_prompt: the tokens are the prompt's.
    """

    index: int
    text: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)
    of_prompt: bool = False
    ending: Ending | None = None


_Stream = AsyncIterator[inference_pb2.GenerateEvent]
_Event = tuple[int, inference_pb2.GenerateEvent]


class Generation:
    """The calls of one request, one a prompt, with n choices each; choice i of prompt p has the index p * n + i.

    ``start`` and ``pieces`` raise ApiError, or ClientGone after ``stop`` said so. ``close`` must be called at the end.
    """

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceStub,
        requests: Sequence[inference_pb2.GenerateRequest],
        *,
        timeout: float,
        metadata: Sequence[tuple[str, str]] = (),
        param_of: ParamOf,
        metrics: Metrics,
        streamed: bool,
        reasoning: Callable[[], ReasoningTokens] | None = None,
        on_close: Callable[["Generation"], None],
        on_tokens: Callable[[int], None] | None = None,
        span: Span = NO_SPAN,
    ) -> None:
        """Begins the calls. Needs a running loop.

        Args:
            stub: of the router.
            requests: at least one.
            timeout: seconds that the calls may take.
            metadata: of the calls.
            param_of: names the body's fields.
            metrics: count what happens.
            streamed: times between pieces are measured.
            reasoning: makes what counts the tokens of a choice's reasoning, of which the requests then ask the bytes.
            on_close: is called once, at the end.
            on_tokens: is told how many tokens were used, in parts: each prompt's, and each choice's at its end. Of a
                choice that does not come to its end, as many as have come; where ids are not asked for, a piece is one.
            span: of the HTTP request, in traces.
        """
        self.id = requests[0].request_id
        self._n = requests[0].n or 1
        self.num_choices = self._n * len(requests)
        self.prompt_tokens = 0
        # Headers that tell how the first prompt came to its worker.
        self.route: dict[str, str] = {}
        self.completion_tokens = 0
        # Of the choices that have ended.
        self.finish_reasons: dict[int, FinishReason] = {}
        # Seconds until the first text of a stream.
        self.first_text_s: float | None = None
        self._span = span
        self._cached_tokens: dict[int, int] = {}
        self._arrival = time.perf_counter()
        self._param_of = param_of
        self._metrics = metrics
        self._streamed = streamed
        self._reasoning = [reasoning() for _ in range(self.num_choices)] if reasoning is not None else []
        self._on_close = on_close
        self._on_tokens = on_tokens
        # Tokens of the choices that have not ended.
        self._tokens_sent: dict[int, int] = {}
        self._unfinished = set(range(self.num_choices))
        self._cut: set[int] = set()
        self._closed = False
        self._stopped_by: ApiError | ClientGone | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._calls = [
            stub.Generate(request, timeout=timeout, metadata=[*metadata, *span.carrier]) for request in requests
        ]
        self._streams: list[_Stream] = [_events_of(call) for call in self._calls]
        metrics.num_requests_running.inc()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in a prefix cache already. The n choices of a prompt share its prompt tokens."""
        return sum(self._cached_tokens.values())

    @property
    def reasoning_tokens(self) -> int:
        """Completion tokens that are reasoning, where that is told from the rest."""
        return sum(one.count for one in self._reasoning)

    async def start(self) -> None:
        """Waits until the router has accepted every prompt."""
        for prompt, stream in enumerate(self._streams):
            with self._answering(prompt):
                event = await anext(stream, None)
            if event is None or event.WhichOneof("event") != "started":
                raise internal("the router's stream does not begin with Started")
            self.prompt_tokens += event.started.prompt_tokens
            if not prompt:
                self.route = _first_headers(event.started.route)
        self._metrics.prompt_tokens.inc(self.prompt_tokens)
        if self._on_tokens is not None:
            self._on_tokens(self.prompt_tokens)

    async def pieces(self) -> AsyncIterator[Piece]:
        """All text, in order within a choice, and the ending of each choice."""
        last_time: dict[int, float] = {}
        async for prompt, event in self._events():
            kind = event.WhichOneof("event")
            if kind == "prompt_logprobs":
                for piece in self._prompt_pieces(prompt, event.prompt_logprobs):
                    yield piece
                continue
            body = event.delta if kind == "delta" else event.finished
            index = prompt * self._n + body.index
            if index in self._cut:
                continue
            if kind == "started" or body.index >= self._n or index not in self._unfinished:
                raise internal(f"the router sent {kind} for choice {body.index}, which does not run")
            if kind == "delta":
                delta = event.delta
                if self._reasoning:
                    self._reasoning[index].take(delta.token_bytes)
                if self._on_tokens is not None:
                    count = len(delta.token_ids) or 1
                    self._tokens_sent[index] = self._tokens_sent.get(index, 0) + count
                if delta.text or delta.logprobs.logprobs:
                    if self._streamed:
                        self._observe_piece(index, last_time)
                    tokens = tokens_of(delta.logprobs, iter(delta.token_bytes), iter(delta.top_token_bytes))
                    yield Piece(index, delta.text, tokens)
                    if not self._unfinished:
                        return  # the caller has cut off what was left
                continue
            self._unfinished.discard(index)
            self._tokens_sent.pop(index, None)
            ending = self._end(prompt, event.finished)
            self.finish_reasons[index] = ending.reason
            yield Piece(index, ending=ending)
        self.route.update(_route_headers(await self._calls[0].trailing_metadata()))
        if self._unfinished:
            raise internal(f"the router ended its stream with {len(self._unfinished)} choices unfinished")
        self._metrics.e2e_request_latency.observe(time.perf_counter() - self._arrival)

    def cut(self, index: int, reason: FinishReason) -> None:
        """Ends a choice from here; a request of which nothing more is wanted is ended by ``close``.

        What it took is then known by what has come.
        """
        self._cut.add(index)
        if index not in self._unfinished:
            return
        self._unfinished.discard(index)
        self.finish_reasons[index] = reason
        tokens = self._tokens_sent.pop(index, 0)
        self.completion_tokens += tokens
        self._metrics.generation_tokens.inc(tokens)
        self._metrics.request_success.labels(reason).inc()
        if self._on_tokens is not None:
            self._on_tokens(tokens)

    def is_cut(self, index: int) -> bool:
        """Whether a choice has been ended by ``cut``."""
        return index in self._cut

    def stop(self, why: ApiError | ClientGone) -> None:
        """Cancels the calls; whoever waits for a piece gets ``why`` raised. Does nothing when stopped already."""
        if self._stopped_by is None and not self._closed:
            self._stopped_by = why
            for call in self._calls:
                call.cancel()

    def close(self) -> None:
        """Ends what still runs. Does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        for pump in self._pumps:
            pump.cancel()
        for call in self._calls:
            call.cancel()
        self._metrics.num_requests_running.dec()
        if self._span.recording:
            self._span.set(of_response(self))
        if self._on_tokens is not None:
            self._on_tokens(sum(self._tokens_sent.values()))
        self._on_close(self)

    async def _events(self) -> AsyncIterator[_Event]:
        if len(self._streams) > 1:
            async for tagged in self._merged():
                yield tagged
            return
        # The usual case has no queue on the way of a token.
        with self._answering(0):
            async for event in self._streams[0]:
                yield 0, event

    async def _merged(self) -> AsyncIterator[_Event]:
        queue: asyncio.Queue[_Event | Exception | None] = asyncio.Queue(_MAX_QUEUED_EVENTS)
        self._pumps = [
            asyncio.create_task(self._pump(prompt, stream, queue)) for prompt, stream in enumerate(self._streams)
        ]
        running = len(self._pumps)
        while running:
            event = await queue.get()
            if event is None:
                running -= 1
            elif isinstance(event, Exception):
                raise event
            else:
                yield event

    async def _pump(self, prompt: int, stream: _Stream, queue: "asyncio.Queue[_Event | Exception | None]") -> None:
        try:
            with self._answering(prompt):
                async for event in stream:
                    await queue.put((prompt, event))
        except (ApiError, ClientGone) as error:
            await queue.put(error)
        else:
            await queue.put(None)

    @contextmanager
    def _answering(self, prompt: int) -> Iterator[None]:
        """Turns what gRPC raises for a prompt into what this class raises."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            failure = from_rpc(error, partial(self._param_in, prompt))
            self._span.fail(failure.code or failure.type)
            raise failure from None
        except asyncio.CancelledError:
            # gRPC raises the same for a cancelled call as asyncio does for a cancelled task.
            if self._stopped_by is None:
                raise
            raise self._stopped_by from None

    def _param_in(self, prompt: int, field: str) -> str | None:
        """The field's name in the body; with several prompts, ``prompt.1.0`` is the first token of the second one."""
        name = self._param_of(field)
        if name is None or len(self._calls) == 1 or not (name == "prompt" or name.startswith("prompt.")):
            return name
        return f"prompt.{prompt}{name.removeprefix('prompt')}"

    def _prompt_pieces(self, prompt: int, report: inference_pb2.PromptLogprobs) -> Iterator[Piece]:
        """The prompt's tokens, for each of its choices."""
        tokens = tokens_of(report.logprobs, iter(report.token_bytes), iter(report.top_token_bytes))
        for index in range(prompt * self._n, (prompt + 1) * self._n):
            yield Piece(index, tokens=tokens, of_prompt=True)

    def _observe_piece(self, index: int, last_time: dict[int, float]) -> None:
        now = time.perf_counter()
        if not last_time:
            self.first_text_s = now - self._arrival
            self._metrics.time_to_first_token.observe(self.first_text_s)
        if index in last_time:
            self._metrics.inter_token_latency.observe(now - last_time[index])
        last_time[index] = now

    def _end(self, prompt: int, finished: inference_pb2.Finished) -> Ending:
        reason = _REASONS.get(finished.reason)
        if reason is None:
            raise _failure(finished.reason)
        usage = finished.usage
        self.completion_tokens += usage.completion_tokens
        # Later choices find what the first one computed; what was there before the request is the least of them.
        cached = self._cached_tokens.get(prompt, usage.cached_tokens)
        self._cached_tokens[prompt] = min(cached, usage.cached_tokens)
        self._metrics.generation_tokens.inc(usage.completion_tokens)
        if self._on_tokens is not None:
            self._on_tokens(usage.completion_tokens)
        self._metrics.request_success.labels(reason).inc()
        cause = finished.WhichOneof("stop_cause")
        return Ending(reason, getattr(finished, cause) if cause else None)


async def _events_of(call: AsyncIterable[inference_pb2.GenerateResponse]) -> _Stream:
    """The events of a call, one by one, however they came together in messages."""
    async for response in call:
        for event in response.events:
            yield event


def _first_headers(route: inference_pb2.Route) -> dict[str, str]:
    """What is known of a request's way when it begins, by header."""
    if not route.worker:
        return {}
    return {
        "x-quire-worker": route.worker,
        "x-quire-reason": route.reason,
        "x-quire-predicted-cached-tokens": str(route.predicted_cached_tokens),
        "x-quire-cached-tokens": str(route.cached_tokens),
        "x-quire-queue-ms": str(route.queue_ms),
    }


def _route_headers(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """The same at its end, and more; other metadata is gRPC's own."""
    return {key: str(value) for key, value in metadata or () if key in ROUTE_HEADERS}


def _failure(reason: int) -> ApiError:
    """A choice that ended without being complete is an error for the client, never a short answer."""
    if reason == sampling_pb2.FINISH_REASON_CANCELLED:
        return ApiError(CLIENT_CLOSED_REQUEST, "The request was cancelled.", code="request_cancelled")
    if reason == sampling_pb2.FINISH_REASON_DEADLINE:
        return ApiError(504, "The request took too long and was ended.", type=SERVER_ERROR, code="timeout")
    return internal(f"the router finished a choice with reason {reason}")

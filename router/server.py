"""Serves the Inference service: from a call to its prompt, its place in the queue, and its stream of text."""

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from grpc.aio import ServicerContext

from protos import inference_pb2, inference_pb2_grpc
from router.chat_template import TemplateFailed
from router.config import RouterConfig
from router.errors import (
    Cancelled,
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    QueueFull,
    RequestError,
    Unavailable,
    UnknownModel,
    abort,
)
from router.fleet import Fleet
from router.request import Request
from router.scheduler import Scheduler
from router.tokenizer import Tokenizer
from router.validation import chat_messages, check_prompt, check_request, resolve_parameters

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context = ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """All running requests.

    Args:
        config: names, limits.
        tokenizer: the model's.
        fleet: the workers.
    """

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, fleet: Fleet) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._scheduler = Scheduler(fleet, config.policy)
        fleet.requeue = self._scheduler.requeue
        self._created = int(time.time())
        # Tokenizing and templating take milliseconds: never on the event loop.
        self._pool = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")
        self._requests: dict[str, Request | None] = {}  # None while it is being tokenized
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def bind(self) -> None:
        """The fleet changed: waiting choices may find a worker."""
        self._scheduler.bind()

    async def drain(self, grace: float) -> None:
        """Refuses new requests and gives running ones ``grace`` seconds."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace)
        except TimeoutError:
            logger.warning("%d requests still ran after %g s and were cut off", len(self._requests), grace)
            for request in self._requests.values():
                if request is not None:
                    request.fail(Unavailable("the router is shutting down"))
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- Generate ----

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """See protos/inference.proto."""
        request_id = request.request_id or f"gen-{secrets.token_hex(12)}"
        try:
            self._enter(request_id, request.model)
            try:
                async for response in self._generate(request_id, request, context):
                    yield response
            finally:
                self._leave(request_id)
        except RequestError as error:
            await abort(context, error)
        except Exception:
            await abort(context, self._internal(f"request {request_id}"))

    def _enter(self, request_id: str, model: str) -> None:
        self._check_model(model)
        if self._draining:
            raise Unavailable("the router is shutting down")
        if request_id in self._requests:
            raise DuplicateRequest(f"request_id {request_id!r} is in use by a running request")
        limit = self._config.max_num_queued_reqs
        unstarted = sum(running is None for running in self._requests.values()) + self._scheduler.num_waiting
        if unstarted >= limit:
            raise QueueFull(f"{unstarted} requests wait already, the most that may (--max-num-queued-reqs)", 1.0)
        self._requests[request_id] = None
        self._idle.clear()

    def _leave(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        if request is not None:
            for choice in request.choices:
                self._scheduler.remove(choice)
        if not self._requests:
            self._idle.set()

    async def _generate(
        self, request_id: str, call: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        check_request(call, self._fleet.model_vocab_size)
        prompt = await self._prompt_ids(call)
        max_model_len = self._fleet.max_model_len
        if not max_model_len:
            raise Unavailable("no worker is ready; the service is starting or its workers are down")
        parameters = resolve_parameters(call, len(prompt), max_model_len, self._tokenizer.eos_token_ids)
        time_left = context.time_remaining()
        request = Request(
            request_id,
            prompt,
            parameters,
            call.cache_salt.encode(),
            time.monotonic() + time_left if time_left is not None else None,
            [self._tokenizer.detokenizer() for _ in range(parameters.n)],
        )
        self._requests[request_id] = request
        started = inference_pb2.Started(request_id=request_id, model=call.model, prompt_tokens=len(prompt))
        yield inference_pb2.GenerateResponse(started=started)
        self._scheduler.add(request.choices)
        await self._wait_for_worker(request)
        while True:
            request.changed.clear()
            # Events of a finished choice go out even when the request failed meanwhile through another one.
            finished = request.finished
            for event in request.take_events():
                yield event
            if request.error is not None:
                raise request.error
            if finished:
                return
            await request.changed.wait()

    async def _wait_for_worker(self, request: Request) -> None:
        """Waits until no choice is queued, or the request failed. Raises QueueFull after ``max_queue_wait``."""
        limit = self._config.max_queue_wait
        try:
            async with asyncio.timeout(limit):
                while any(self._scheduler.is_waiting(choice) for choice in request.choices) and not request.error:
                    request.changed.clear()
                    if any(choice.num_emitted for choice in request.choices):
                        return
                    await request.changed.wait()
        except TimeoutError:
            raise QueueFull(
                f"no worker could start the request within {limit:g} s (--max-queue-wait)", limit / 4
            ) from None

    async def _prompt_ids(
        self, call: "inference_pb2.GenerateRequest | inference_pb2.ExplainRequest | inference_pb2.TokenizeRequest"
    ) -> "array[int]":
        """The prompt's token ids. Raises InvalidRequest when the chat template refuses the messages."""
        match call.WhichOneof("prompt"):
            case "text":
                special = True
                if isinstance(call, inference_pb2.TokenizeRequest) and call.HasField("add_special_tokens"):
                    special = call.add_special_tokens
                return await self._in_pool(lambda: self._tokenizer.encode(call.text, special))
            case "chat":
                chat = call.chat
                opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
                messages = chat_messages(chat)
                try:
                    return await self._in_pool(lambda: self._tokenizer.encode_chat(messages, opens))
                except TemplateFailed as error:
                    raise InvalidRequest("chat", str(error)) from error
            case _:
                assert not isinstance(call, inference_pb2.TokenizeRequest)
                return array("I", call.token_ids.ids)

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    # ---- the other calls ----

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """See protos/inference.proto."""
        try:
            self._check_model(request.model)
            check_prompt(request, self._fleet.model_vocab_size)
            ids = await self._prompt_ids(request)
        except RequestError as error:
            await abort(context, error)
        return inference_pb2.TokenizeResponse(token_ids=ids.tolist(), max_model_len=self._fleet.max_model_len)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """See protos/inference.proto."""
        try:
            self._check_model(request.model)
            vocab_size = self._fleet.model_vocab_size
            for index, token_id in enumerate(request.token_ids):
                if token_id >= vocab_size:
                    raise InvalidRequest(
                        f"token_ids[{index}]", f"is {token_id}; the vocabulary has {vocab_size} tokens"
                    )
        except RequestError as error:
            await abort(context, error)
        ids = list(request.token_ids)
        return inference_pb2.DetokenizeResponse(text=await self._in_pool(lambda: self._tokenizer.decode(ids)))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """See protos/inference.proto."""
        return inference_pb2.ListModelsResponse(models=[self._model(name) for name in self._config.served_model_name])

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Context) -> inference_pb2.Model:
        """See protos/inference.proto."""
        try:
            self._check_model(request.model)
        except RequestError as error:
            await abort(context, error)
        return self._model(request.model)

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        """See protos/inference.proto."""
        results = []
        for request_id in request.request_ids:
            result = inference_pb2.CancelResponse.Result(request_id=request_id)
            running = self._requests.get(request_id)
            if running is None or running.finished:
                result.outcome = inference_pb2.CancelResponse.OUTCOME_NOT_FOUND
            else:
                running.fail(Cancelled("the request was cancelled"))
                result.outcome = inference_pb2.CancelResponse.OUTCOME_CANCELLED
                result.usage.CopyFrom(running.usage())
            results.append(result)
        return inference_pb2.CancelResponse(results=results)

    async def Explain(self, request: inference_pb2.ExplainRequest, context: Context) -> inference_pb2.ExplainResponse:
        """See protos/inference.proto."""
        try:
            self._check_model(request.model)
            check_prompt(request, self._fleet.model_vocab_size)
            ids = await self._prompt_ids(request)
        except RequestError as error:
            await abort(context, error)
        chosen = self._scheduler.choose()
        return inference_pb2.ExplainResponse(
            prompt_tokens=len(ids),
            policy=self._scheduler.policy,
            chosen=chosen.address if chosen else "",
            candidates=[
                inference_pb2.ExplainResponse.Candidate(
                    worker=link.address,
                    ready=link.ready,
                    running=link.running,
                    capacity=link.capacity,
                    score=self._scheduler.score(link)[0],
                )
                for link in self._fleet.links
            ],
            queued=self._scheduler.num_waiting,
        )

    def _model(self, name: str) -> inference_pb2.Model:
        return inference_pb2.Model(
            name=name,
            max_model_len=self._fleet.max_model_len,
            created=self._created,
            ready_workers=len(self._fleet.ready),
        )

    def _check_model(self, model: str) -> None:
        if model not in self._config.served_model_name:
            served = ", ".join(self._config.served_model_name)
            raise UnknownModel(f"model {model!r} is not served here; served: {served}")

    def _internal(self, what: str) -> InternalError:
        error = InternalError()
        logger.exception("%s: %s", error.id, what)
        return error

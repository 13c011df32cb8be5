"""The OpenAI endpoints and vLLM's tokenizing ones: a body in, calls to the router, a reply out."""

import re
import time
import uuid
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.guard import key_use_of
from gateway.bodies import JsonRoute
from gateway.caller import name_caller
from gateway.chat_dialect import NO_TEMPLATE, Dialect, asks_for_template, dialect_of
from gateway.chunks import CHAT, COMPLETION, Chunks, Shape
from gateway.config import GatewayConfig
from gateway.conversation import check_messages
from gateway.errors import invalid
from gateway.generation import Ending, Generation
from gateway.logprobs import LogprobShaper, TokenLogprob
from gateway.output_plan import output_plan
from gateway.output_reader import OutputReader
from gateway.replies import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Completion,
    CompletionChunk,
    DetokenizeReply,
    ErrorReply,
    ModelList,
    ModelReply,
    TextChoice,
    TextLogprobs,
    TokenizeReply,
    ToolCall,
)
from gateway.schema import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody, ignored_fields
from gateway.size_check import check_sizes
from gateway.stream import EventStream, stopped_with_client, usage_of
from gateway.tools import check_tools
from gateway.translate import JSON_DIALECT, chat_requests, completion_requests, param_names, tokenize_request
from gateway.unsupported import refuse_in_messages, refuse_unsupported
from gateway.upstream import Upstream
from protos import inference_pb2

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request cannot be served as it is."},
    "5XX": {"model": ErrorReply, "description": "The request may succeed later."},
}

_IGNORED_HEADER = "x-quire-ignored-fields"
# Names come from the client, and a header is no place for everything.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_IGNORED_NAMES = 32

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


async def upstream_of(request: Request) -> Upstream:
    """The app's connection to the router. Async only because FastAPI would run it in a thread otherwise."""
    upstream: Upstream = request.app.state.upstream
    return upstream


def config_of(request: Request) -> GatewayConfig:
    """The app's settings."""
    config: GatewayConfig = request.app.state.config
    return config


FromUpstream = Annotated[Upstream, Depends(upstream_of)]


def _replies(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of an endpoint that streams on request; ``app`` adds the chunk's schema."""
    schema = {"$ref": f"#/components/schemas/{chunk.__name__}"}
    description = "The reply. With stream=true, server-sent events: each holds a chunk or an error, the last [DONE]."
    return {200: {"model": whole, "description": description, "content": {"text/event-stream": {"schema": schema}}}}


@router.post("/v1/chat/completions", responses=_replies(ChatCompletion, ChatCompletionChunk))
async def chat_completions(body: ChatBody, request: Request, upstream: FromUpstream) -> Response:
    """Answers a conversation."""
    check_sizes(body, config_of(request).limits)
    refuse_unsupported(body)
    check_messages(body.messages)
    check_tools(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    id_ = f"chatcmpl-{uuid.uuid4().hex}"
    dialect = await _dialect(body, request, upstream)
    requests = chat_requests(body, id_, dialect)
    return await _generate(body, request, upstream, id_, requests, CHAT, [], bool(body.logprobs), dialect)


@router.post("/v1/completions", responses=_replies(Completion, CompletionChunk))
async def completions(body: CompletionBody, request: Request, upstream: FromUpstream) -> Response:
    """Continues one or several prompts."""
    check_sizes(body, config_of(request).limits)
    refuse_unsupported(body)
    id_ = f"cmpl-{uuid.uuid4().hex}"
    requests = completion_requests(body, id_)
    echoes = await _echoes(requests, body.n or 1, upstream) if body.echo else []
    return await _generate(body, request, upstream, id_, requests, COMPLETION, echoes, body.logprobs is not None)


@router.get("/v1/models")
async def list_models(upstream: FromUpstream) -> ModelList:
    """The models that requests may name."""
    return ModelList(data=[_model(model) for model in (await upstream.list_models()).models])


@router.get("/v1/models/{model:path}")
async def get_model(model: str, upstream: FromUpstream) -> ModelReply:
    """One model; 404 when it is not served."""
    return _model(await upstream.get_model(model))


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request, upstream: FromUpstream) -> TokenizeReply:
    """The token ids of a prompt or a conversation."""
    check_sizes(body, config_of(request).limits)
    if body.messages is not None:
        refuse_in_messages(body.messages)
        check_messages(body.messages)
    call = tokenize_request(body, await _dialect(body, request, upstream))
    reply = await upstream.tokenize(call, param_names(body))
    ids = list(reply.token_ids)
    return TokenizeReply(count=len(ids), max_model_len=reply.max_model_len, tokens=ids)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, upstream: FromUpstream) -> DetokenizeReply:
    """The text of token ids."""
    request = inference_pb2.DetokenizeRequest(model=body.model, token_ids=body.tokens)
    return DetokenizeReply(prompt=(await upstream.detokenize(request, param_names(body))).text)


async def _dialect(body: ChatBody | TokenizeBody, request: Request, upstream: Upstream) -> Dialect:
    """How the body's model is spoken to; the router is asked only where it matters."""
    template = NO_TEMPLATE
    if asks_for_template(body):
        template = (await upstream.get_model(body.model)).chat_template
    return dialect_of(body, template, config_of(request).tool_call_parser)


async def _echoes(requests: list[inference_pb2.GenerateRequest], n: int, upstream: Upstream) -> list[str]:
    """The prompts' texts, one for each choice."""
    texts = []
    for request in requests:
        text = request.text
        if request.WhichOneof("prompt") == "token_ids":
            ids = inference_pb2.DetokenizeRequest(model=request.model, token_ids=request.token_ids.ids)
            text = (await upstream.detokenize(ids, lambda field: "prompt")).text
        texts += [text] * n
    return texts


async def _generate(
    body: GenerateBody,
    request: Request,
    upstream: Upstream,
    id_: str,
    requests: list[inference_pb2.GenerateRequest],
    shape: Shape,
    echoes: list[str],
    with_logprobs: bool,
    dialect: Dialect = JSON_DIALECT,
) -> Response:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
    plan = output_plan(body, config_of(request), dialect.tool_format)
    created = int(time.time())
    key_use = key_use_of(request)
    name_caller(requests, request.headers, body, None if key_use is None else key_use.key)
    request.state.generation_id = id_
    generation = upstream.generate(requests, param_names(body), streamed=bool(body.stream), key_use=key_use)
    try:
        async with stopped_with_client(request.receive, generation):
            # Not before all prompts are accepted is it known that the status is 200.
            await generation.start()
            shaper = LogprobShaper(shape is CHAT, generation.num_choices) if with_logprobs else None
            readers = [OutputReader(plan) for _ in range(generation.num_choices)]
            choices = [] if body.stream else await _collect(generation, echoes, shaper, readers)
    except BaseException:
        generation.close()
        raise
    headers = {**_ignored_header(body, dialect), **generation.route}
    if body.stream:
        chunks = Chunks(
            shape,
            id=id_,
            created=created,
            model=body.model,
            num_choices=generation.num_choices,
            include_usage=body.include_usage(),
        )
        return EventStream(
            generation,
            chunks,
            include_usage=body.include_usage(),
            headers=headers,
            readers=readers,
            splits=plan.splits,
            echoes=echoes,
            shaper=shaper,
        )
    generation.close()
    reply = _whole(shape, id_, created, body.model, choices, generation)
    return Response(reply.model_dump_json(), media_type="application/json", headers=headers)


@dataclass(frozen=True)
class _Choice:
    """One complete choice."""

    text: str
    output: OutputReader
    ending: Ending
    logprobs: dict[str, Any] | None


async def _collect(
    generation: Generation, echoes: list[str], shaper: LogprobShaper | None, readers: list[OutputReader]
) -> list[_Choice]:
    """Every choice, complete."""
    tokens: list[list[TokenLogprob]] = [[] for _ in range(generation.num_choices)]
    endings: dict[int, Ending] = {}
    async for piece in generation.pieces():
        reader = readers[piece.index]
        reader.push(piece.text)
        tokens[piece.index] += piece.tokens
        if piece.ending is not None:
            _, endings[piece.index] = reader.finish(piece.ending)
    return [
        _Choice(
            (echoes[index] if echoes else "") + "".join(reader.content),
            reader,
            endings[index],
            shaper.shape(index, tokens[index]) if shaper else None,
        )
        for index, reader in enumerate(readers)
    ]


def _whole(
    shape: Shape, id_: str, created: int, model: str, choices: list[_Choice], generation: Generation
) -> ChatCompletion | Completion:
    usage = usage_of(generation)
    if shape is CHAT:
        messages = [
            ChatChoice(
                index=index,
                message=_message(choice),
                logprobs=None if choice.logprobs is None else ChatLogprobs.model_validate(choice.logprobs),
                finish_reason=choice.ending.reason,
                stop_reason=choice.ending.stop_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return ChatCompletion(id=id_, created=created, model=model, choices=messages, usage=usage)
    texts = [
        TextChoice(
            index=index,
            text=choice.text,
            logprobs=None if choice.logprobs is None else TextLogprobs.model_validate(choice.logprobs),
            finish_reason=choice.ending.reason,
            stop_reason=choice.ending.stop_reason,
        )
        for index, choice in enumerate(choices)
    ]
    return Completion(id=id_, created=created, model=model, choices=texts, usage=usage)


def _message(choice: _Choice) -> AssistantMessage:
    calls = [
        ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in choice.output.calls
    ]
    return AssistantMessage(
        content=choice.text or (None if calls else ""),
        reasoning_content="".join(choice.output.reasoning) or None,
        tool_calls=calls or None,
    )


def _ignored_header(body: GenerateBody, dialect: Dialect) -> dict[str, str]:
    names = [name for name in (*ignored_fields(body), *dialect.ignored) if _PLAIN_NAME.fullmatch(name)]
    return {_IGNORED_HEADER: ", ".join(names[:_MAX_IGNORED_NAMES])} if names else {}


def _model(model: inference_pb2.Model) -> ModelReply:
    return ModelReply(id=model.name, created=model.created, max_model_len=model.max_model_len)

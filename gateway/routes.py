"""OpenAI's older endpoints and vLLM's tokenizing ones: a body in, calls to the router, a reply out."""

import uuid
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import answer
from gateway.bodies import JsonRoute
from gateway.dependencies import ERRORS, FromUpstream, config_of, replies
from gateway.openai_forms import ChatForm, CompletionForm
from gateway.preparing import Prepared, prepare_chat, prepare_tokenize
from gateway.replies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DetokenizeReply,
    ModelList,
    ModelReply,
    TokenizeReply,
)
from gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.size_check import check_sizes
from gateway.translate import completion_requests, param_names
from gateway.unsupported import refuse_unsupported
from gateway.upstream import Upstream
from protos import inference_pb2

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


def _replies(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """``app`` adds the chunk's schema to the document."""
    schema = {"$ref": f"#/components/schemas/{chunk.__name__}"}
    how = "The reply. With stream=true, server-sent events: each holds a chunk or an error, the last [DONE]."
    return replies(whole, schema, how)


@router.post("/v1/chat/completions", responses=_replies(ChatCompletion, ChatCompletionChunk))
async def chat_completions(body: ChatBody, request: Request, upstream: FromUpstream) -> Response:
    """Answers a conversation."""
    id_ = f"chatcmpl-{uuid.uuid4().hex}"
    prepared = await prepare_chat(body, id_, request, upstream)
    return await answer(prepared, ChatForm(id_, body), request, upstream)


@router.post("/v1/completions", responses=_replies(Completion, CompletionChunk))
async def completions(body: CompletionBody, request: Request, upstream: FromUpstream) -> Response:
    """Continues one or several prompts."""
    check_sizes(body, config_of(request).limits)
    refuse_unsupported(body)
    id_ = f"cmpl-{uuid.uuid4().hex}"
    requests = completion_requests(body, id_)
    echoes = await _echoes(requests, body.n or 1, upstream) if body.echo else []
    prepared = Prepared(body, id_, requests, echoes=echoes, with_logprobs=body.logprobs is not None)
    return await answer(prepared, CompletionForm(id_, body), request, upstream)


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
    call = await prepare_tokenize(body, request, upstream)
    reply = await upstream.tokenize(call, param_names(body))
    ids = list(reply.token_ids)
    return TokenizeReply(count=len(ids), max_model_len=reply.max_model_len, tokens=ids)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, upstream: FromUpstream) -> DetokenizeReply:
    """The text of token ids."""
    request = inference_pb2.DetokenizeRequest(model=body.model, token_ids=body.tokens)
    return DetokenizeReply(prompt=(await upstream.detokenize(request, param_names(body))).text)


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


def _model(model: inference_pb2.Model) -> ModelReply:
    return ModelReply(id=model.name, created=model.created, max_model_len=model.max_model_len)

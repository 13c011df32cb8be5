"""OpenAI's older endpoints and vLLM's tokenizing ones: a body in, calls to the router, a reply out."""

import uuid
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.guard import count_request
from gateway.answering import answer
from gateway.bodies import JsonRoute
from gateway.dependencies import ERRORS, FromUpstream, replies
from gateway.openai_forms import ChatForm, CompletionForm
from gateway.preparing import prepare_chat, prepare_completion, prepare_tokenize
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
from gateway.translate import param_names
from protos import inference_pb2

router = APIRouter(route_class=JsonRoute, responses=ERRORS)


def _replies(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Describes one event of the stream; ``app`` adds the chunk's schema to the document."""
    chunks = {
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": f"#/components/schemas/{chunk.__name__}"},
    }
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, chunks]}
    schema = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    how = "The reply. With stream=true, server-sent events: each holds a chunk or an error, the last [DONE]."
    return replies(whole, schema, how)


@router.post("/v1/chat/completions", responses=_replies(ChatCompletion, ChatCompletionChunk))
async def chat_completions(body: ChatBody, request: Request, upstream: FromUpstream) -> Response:
    """Answers a conversation."""
    id_ = f"chatcmpl-{uuid.uuid4().hex}"
    prepared = await prepare_chat(body, id_, request, upstream)
    return await answer(prepared, ChatForm(prepared), request, upstream)


@router.post("/v1/completions", responses=_replies(Completion, CompletionChunk))
async def completions(body: CompletionBody, request: Request, upstream: FromUpstream) -> Response:
    """Continues one or several prompts."""
    id_ = f"cmpl-{uuid.uuid4().hex}"
    prepared = await prepare_completion(body, id_, request, upstream)
    return await answer(prepared, CompletionForm(prepared), request, upstream)


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
    count_request(request)
    call = await prepare_tokenize(body, request, upstream)
    reply = await upstream.tokenize(call, param_names(body))
    ids = list(reply.token_ids)
    return TokenizeReply(count=len(ids), max_model_len=reply.max_model_len, tokens=ids)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request, upstream: FromUpstream) -> DetokenizeReply:
    """The text of token ids."""
    count_request(request)
    call = inference_pb2.DetokenizeRequest(model=body.model, token_ids=body.tokens)
    return DetokenizeReply(prompt=(await upstream.detokenize(call, param_names(body))).text)


def _model(model: inference_pb2.Model) -> ModelReply:
    return ModelReply(id=model.name, created=model.created, max_model_len=model.max_model_len)

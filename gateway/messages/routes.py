"""POST /v1/messages, and the count of its tokens."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.guard import count_request
from gateway.answering import answer
from gateway.bodies import JsonRoute
from gateway.dependencies import ERRORS, FromUpstream, replies
from gateway.errors import ApiError
from gateway.messages.form import MessageForm
from gateway.messages.replies import CountTokensReply, MessageReply, MessagesErrorReply
from gateway.messages.schema import CountTokensBody, MessagesBody
from gateway.messages.translate import chat_body, ignored, name_of, tokenize_body
from gateway.preparing import prepare_chat, prepare_tokenize
from gateway.translate import param_names

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**described, "model": MessagesErrorReply} for status, described in ERRORS.items()
}

router = APIRouter(route_class=JsonRoute, responses=_ERRORS)
_EVENTS = "The message. With stream=true, server-sent events named by their types, the last of them message_stop."


@router.post("/v1/messages", responses=replies(MessageReply, {"type": "object"}, _EVENTS))
async def messages(body: MessagesBody, request: Request, upstream: FromUpstream) -> Response:
    """Answers a conversation."""
    id_ = f"msg_{uuid.uuid4().hex}"
    with _naming():
        prepared = await prepare_chat(chat_body(body), id_, request, upstream)
        prepared = replace(prepared, ignored=[*prepared.ignored, *ignored(body)], name_of=partial(name_of, body=body))
        return await answer(prepared, MessageForm(id_, body.model), request, upstream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensBody, request: Request, upstream: FromUpstream) -> CountTokensReply:
    """The tokens of a conversation."""
    count_request(request)
    conversation = tokenize_body(body)
    call = await prepare_tokenize(conversation, request, upstream)
    return CountTokensReply(input_tokens=len((await upstream.tokenize(call, param_names(conversation))).token_ids))


@contextmanager
def _naming() -> Iterator[None]:
    """Errors that leave the block name the client's fields."""
    try:
        yield
    except ApiError as error:
        if error.param is not None and name_of(error.param) != error.param:
            error.message = error.message.replace(error.param, name_of(error.param))
        raise

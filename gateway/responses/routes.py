"""POST /v1/responses."""

import uuid
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.answering import answer
from gateway.bodies import JsonRoute
from gateway.dependencies import ERRORS, FromUpstream, replies
from gateway.preparing import prepare_chat
from gateway.responses.form import ResponseForm
from gateway.responses.replies import ResponseReply
from gateway.responses.schema import ResponsesBody
from gateway.responses.translate import translated

router = APIRouter(route_class=JsonRoute, responses=ERRORS)
_EVENTS = "The response. With stream=true, server-sent events named by their types, the last of them with the response."


@router.post("/v1/responses", responses=replies(ResponseReply, {"type": "object"}, _EVENTS))
async def responses(body: ResponsesBody, request: Request, upstream: FromUpstream) -> Response:
    """Answers a conversation, and forgets it."""
    id_ = f"resp_{uuid.uuid4().hex}"
    translation = translated(body)
    with translation.naming():
        prepared = await prepare_chat(translation.chat, id_, request, upstream)
        prepared = replace(prepared, ignored=[*prepared.ignored, *translation.ignored], name_of=translation.name_of)
        return await answer(prepared, ResponseForm(prepared, body), request, upstream)

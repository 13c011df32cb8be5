"""The one path from a prepared request to its answer, whichever API it came through; a Form says how it looks."""

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway import genai_attributes
from gateway.access.guard import key_use_of
from gateway.caller import name_caller
from gateway.dependencies import config_of
from gateway.errors import invalid
from gateway.generation import Ending, Generation, Piece
from gateway.logprobs import LogprobShaper, TokenLogprob
from gateway.output_plan import output_plan
from gateway.output_policy.filtered import filtered
from gateway.output_reader import Delta, OutputReader
from gateway.preparing import Prepared
from gateway.schema import ChatBody, ignored_fields
from gateway.stream import EventStream, EventWriter, stopped_with_client
from gateway.translate import param_names
from gateway.upstream import Upstream
from protos.tracing import Span

_IGNORED_HEADER = "x-quire-ignored-fields"
# Names come from the client, and a header is no place for everything.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_IGNORED_NAMES = 32


@dataclass(frozen=True)
class Choice:
    """One complete choice.

    Attributes:
        text: its content, with what it echoes.
        output: its parts.
        deltas: how they came, in their order.
        ending: how it ended.
        logprobs: of its tokens, in the endpoint's form.
    """

    text: str
    output: OutputReader
    deltas: Sequence[Delta]
    ending: Ending
    logprobs: dict[str, Any] | None


class Form(Protocol):
    """How one API writes answers."""

    def whole(self, choices: Sequence[Choice], generation: Generation) -> BaseModel:
        """The reply to a request that does not stream."""

    def writer(self, generation: Generation) -> EventWriter:
        """What writes the events of one that does; the generation has been started."""


async def answer(prepared: Prepared, form: Form, request: Request, upstream: Upstream) -> Response:
    """Sends a request to the router and answers it.

    Args:
        prepared: the request.
        form: of the answer.
        request: where it came from.
        upstream: the router.

    Raises:
        ApiError, ClientGone.
    """
    body = prepared.body
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true")
    plan = output_plan(body, config_of(request), prepared.dialect.tool_format)
    key_use = key_use_of(request)
    policy = None if key_use is None else key_use.policy
    if policy is not None and prepared.with_logprobs:
        raise invalid(
            "logprobs", "logprobs cannot be had with this key: they would spell out what its outputs must not"
        )
    for call in prepared.requests:
        if plan.reasoning_tokens is not None:
            call.output.token_bytes = True
        if policy is not None:
            # What a policy cuts off must be known, and end, at once.
            call.output.final_only = False
            call.output.token_ids = True
    name_caller(prepared.requests, request.headers, body, None if key_use is None else key_use.key)
    request.state.generation_id = prepared.id
    span: Span = request.state.span
    if span.recording:
        span.rename(f"{genai_attributes.operation(body)} {prepared.requests[0].model}")
        span.set(genai_attributes.of_request(body, prepared.requests))
    generation = upstream.generate(
        prepared.requests,
        param_names(body),
        streamed=bool(body.stream),
        reasoning=plan.reasoning_tokens,
        key_use=key_use,
        span=span,
    )
    try:
        async with stopped_with_client(request.receive, generation):
            # Not before all prompts are accepted is it known that the status is 200.
            await generation.start()
            shaper = None
            if prepared.with_logprobs:
                shaper = LogprobShaper(isinstance(body, ChatBody), generation.num_choices)
            readers = [OutputReader(plan, policy) for _ in range(generation.num_choices)]
            pieces = generation.pieces() if policy is None else filtered(generation, policy)
            choices = [] if body.stream else await _collect(generation, pieces, prepared.echoes, shaper, readers)
    except BaseException:
        generation.close()
        raise
    headers = {**_ignored_header(prepared), **generation.route}
    if body.stream:
        return EventStream(
            generation,
            pieces,
            form.writer(generation),
            headers=headers,
            readers=readers,
            splits=plan.splits,
            echoes=prepared.echoes,
            shaper=shaper,
        )
    generation.close()
    reply = form.whole(choices, generation)
    return Response(reply.model_dump_json(), media_type="application/json", headers=headers)


async def _collect(
    generation: Generation,
    pieces: AsyncIterator[Piece],
    echoes: Sequence[str],
    shaper: LogprobShaper | None,
    readers: Sequence[OutputReader],
) -> list[Choice]:
    """Every choice, complete."""
    tokens: list[list[TokenLogprob]] = [[] for _ in readers]
    deltas: list[list[Delta]] = [[] for _ in readers]
    endings: dict[int, Ending] = {}
    async for piece in pieces:
        reader = readers[piece.index]
        deltas[piece.index] += reader.push(piece.text)
        tokens[piece.index] += piece.tokens
        ending = piece.ending
        if ending is None and reader.ended:
            ending = Ending("content_filter", None)
            generation.cut(piece.index, ending.reason)
        if ending is not None:
            last, endings[piece.index] = reader.finish(ending)
            deltas[piece.index] += last
    return [
        Choice(
            (echoes[index] if echoes else "") + "".join(reader.content),
            reader,
            deltas[index],
            endings[index],
            shaper.shape(index, tokens[index]) if shaper else None,
        )
        for index, reader in enumerate(readers)
    ]


def _ignored_header(prepared: Prepared) -> dict[str, str]:
    ignored = map(prepared.name_of, (*ignored_fields(prepared.body), *prepared.dialect.ignored))
    names = [name for name in (*ignored, *prepared.ignored) if _PLAIN_NAME.fullmatch(name)]
    return {_IGNORED_HEADER: ", ".join(names[:_MAX_IGNORED_NAMES])} if names else {}

"""Answers as the Responses API has them: one object, or the events by which it came about."""

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.answering import Choice
from gateway.errors import ApiError
from gateway.generation import Ending, Generation
from gateway.output_reader import Delta
from gateway.preparing import Prepared
from gateway.replies import UsageReply
from gateway.responses.items import Event, Items, Status
from gateway.responses.replies import ResponseReply
from gateway.responses.schema import ResponsesBody
from gateway.stream import usage_of

_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ResponseForm:
    """The form of one response, which has one choice."""

    def __init__(self, prepared: Prepared, body: ResponsesBody) -> None:
        self._prepared = prepared
        self._constant = _constant(prepared.id, body)

    def whole(self, choices: Sequence[Choice], generation: Generation) -> ResponseReply:
        """The complete response."""
        (choice,) = choices
        items = Items()
        logprobs = choice.logprobs
        for delta in choice.deltas:
            # All of them go with the first words.
            told, logprobs = (logprobs, None) if delta.get("content") else (None, logprobs)
            list(items.delta(delta, told))
        list(items.close(_status(choice.ending)))
        return ResponseReply.model_validate(
            self.response(items.output, choice.ending, usage_of(generation), completed_at=int(time.time()))
        )

    def writer(self, generation: Generation) -> "ResponseWriter":
        """Writes events."""
        return ResponseWriter(self)

    def response(
        self,
        output: list[dict[str, Any]],
        ending: Ending | None = None,
        usage: UsageReply | None = None,
        completed_at: int | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response as it stands."""
        status = "in_progress" if ending is None else _status(ending)
        reason = None if ending is None else _REASONS.get(ending.reason)
        return {
            **self._constant,
            "service_tier": self._prepared.tier() or "default",
            "status": "failed" if error is not None else status,
            "completed_at": completed_at if status == "completed" else None,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }


class ResponseWriter:
    """Writes the events of one response, numbered from 0."""

    def __init__(self, form: ResponseForm) -> None:
        self._form = form
        self._items = Items()
        self._number = 0
        self._ending: Ending | None = None

    def opening(self) -> bytes:
        """The response, before anything is there."""
        begun = self._form.response([])
        return self._written([("response.created", {"response": begun}), ("response.in_progress", {"response": begun})])

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        """New text of the message."""
        return self.delta(index, {"content": text}, logprobs)

    def delta(self, index: int, delta: Delta, logprobs: dict[str, Any] | None = None) -> bytes:
        """Something new of an item."""
        return self._written(self._items.delta(delta, logprobs))

    def finish(self, index: int, ending: Ending) -> bytes:
        """The end of the last item."""
        self._ending = ending
        return self._written(self._items.close(_status(ending)))

    def end(self, usage: UsageReply) -> bytes:
        """The whole response."""
        assert self._ending is not None
        whole = self._form.response(self._items.output, self._ending, usage, int(time.time()))
        return self._written([(f"response.{whole['status']}", {"response": whole})])

    def error(self, error: ApiError) -> bytes:
        """The response as far as it came, and why it came no further."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._items.break_off()
        failed = self._form.response(self._items.output, error={"code": code, "message": error.message})
        return self._written([("response.failed", {"response": failed})])

    def _written(self, events: Iterable[Event]) -> bytes:
        written = []
        for kind, payload in events:
            data = {"type": kind, "sequence_number": self._number, **payload}
            self._number += 1
            written.append(f"event: {kind}\ndata: {_encode(data)}\n\n")
        return "".join(written).encode()


def _status(ending: Ending) -> Status:
    return "incomplete" if ending.reason in _REASONS else "completed"


def _usage(usage: UsageReply) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _constant(id_: str, body: ResponsesBody) -> dict[str, Any]:
    """What a response says of its request, defaults filled in."""
    text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text is not None else {}
    tools = [{"parameters": None, "strict": False, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()]
    choice = body.tool_choice
    return {
        "id": id_,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }

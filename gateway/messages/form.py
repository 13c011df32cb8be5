"""Answers as the Messages API has them: one object, or the events by which it came about."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.answering import Choice
from gateway.error_replies import messages_error
from gateway.errors import ApiError
from gateway.generation import Ending, Generation
from gateway.messages.blocks import Blocks, Event
from gateway.messages.replies import MessageReply, MessageUsage, StopReason
from gateway.output_reader import Delta
from gateway.replies import UsageReply
from gateway.stream import usage_of

_STOP_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class MessageForm:
    """The form of one message."""

    def __init__(self, id_: str, model: str) -> None:
        self._id = id_
        self._model = model

    def whole(self, choices: Sequence[Choice], generation: Generation) -> MessageReply:
        """The complete message."""
        (choice,) = choices
        blocks = Blocks()
        for delta in choice.deltas:
            list(blocks.delta(delta))
        list(blocks.close())
        return self.message(blocks.content, choice.ending, usage_of(generation))

    def writer(self, generation: Generation) -> "MessageWriter":
        """Writes events."""
        return MessageWriter(self, generation)

    def message(self, content: list[dict[str, Any]], ending: Ending | None, usage: UsageReply) -> MessageReply:
        """The message as it stands."""
        reason, sequence = (None, None) if ending is None else stop_of(ending)
        return MessageReply(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=message_usage(usage),
        )


class MessageWriter:
    """Writes the events of one message."""

    def __init__(self, form: MessageForm, generation: Generation) -> None:
        self._form = form
        self._generation = generation
        self._blocks = Blocks()
        self._ending: Ending | None = None

    def opening(self) -> bytes:
        """The message, before it has content. What of its prompt was cached is not known yet."""
        message = self._form.message([], None, usage_of(self._generation)).model_dump()
        return _written([("message_start", {"message": message})])

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        """New text."""
        return self.delta(index, {"content": text})

    def delta(self, index: int, delta: Delta, logprobs: dict[str, Any] | None = None) -> bytes:
        """Something new of a block."""
        return _written(self._blocks.delta(delta))

    def finish(self, index: int, ending: Ending) -> bytes:
        """The end of the last block."""
        self._ending = ending
        return _written(self._blocks.close())

    def end(self, usage: UsageReply) -> bytes:
        """Why it ended, and what it took."""
        assert self._ending is not None
        reason, sequence = stop_of(self._ending)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        told = {"delta": delta, "usage": message_usage(usage).model_dump()}
        return _written([("message_delta", told), ("message_stop", {})])

    def error(self, error: ApiError) -> bytes:
        """Why it came no further."""
        body = messages_error(error)
        return _written([(body.pop("type"), body)])


def stop_of(ending: Ending) -> tuple[StopReason, str | None]:
    """Why a message ended, and the client's stop sequence if it was one."""
    if ending.reason == "stop" and isinstance(ending.stop_reason, str):
        return "stop_sequence", ending.stop_reason
    return _STOP_REASONS[ending.reason], None


def message_usage(usage: UsageReply) -> MessageUsage:
    """The tokens of a request as this API counts them."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


def _written(events: Iterable[Event]) -> bytes:
    return "".join(
        f"event: {kind}\ndata: {_encode({'type': kind, **payload})}\n\n" for kind, payload in events
    ).encode()

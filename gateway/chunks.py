"""Writes the events of a stream. This runs once a token, so chunks are cut from templates made once a request.

Knows no transport: every method returns the bytes of whole server-sent events.
"""

import json
from dataclasses import dataclass
from typing import Any

from gateway.errors import ApiError
from gateway.generation import Ending
from gateway.replies import UsageReply

DONE = b"data: [DONE]\n\n"

# json.dumps with these options would build an encoder for every call.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event with a JSON object."""
    return f"data: {_encode(data)}\n\n".encode()


@dataclass(frozen=True)
class Shape:
    """What sets the chunks of one endpoint apart. The strings are pieces of JSON inside a choice."""

    object: str
    before_text: str
    after_text: str
    # In the first chunk of a choice, and in the last.
    opening: str | None
    closing: str


CHAT = Shape(
    object="chat.completion.chunk",
    before_text='"delta":{"content":',
    after_text="}",
    opening='"delta":{"role":"assistant","content":""}',
    closing='"delta":{}',
)
COMPLETION = Shape(object="text_completion", before_text='"text":', after_text="", opening=None, closing='"text":""')


class Chunks:
    """The events of one request; all have its id, time (seconds since 1970) and model."""

    def __init__(
        self,
        shape: Shape,
        *,
        id: str,
        created: int,
        model: str,
        num_choices: int,
        include_usage: bool,
        service_tier: str | None = None,
    ) -> None:
        fields = {"id": id, "object": shape.object, "created": created, "model": model}
        if service_tier is not None and shape is CHAT:
            fields["service_tier"] = service_tier
        common = _encode(fields)[:-1]
        self._shape = shape
        self._include_usage = include_usage
        self._head = f"data: {common},"
        # A client that asked for usage finds the field in every chunk, null until the last.
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._before = [f'{self._head}"choices":[{{"index":{index},{shape.before_text}' for index in range(num_choices)]
        self._after = f'{shape.after_text},"logprobs":null,"finish_reason":null}}]{self._tail}'

    def opening(self) -> bytes:
        """The first chunks, one a choice, which say who speaks; nothing where the endpoint has no roles."""
        if self._shape.opening is None:
            return b""
        return b"".join(
            self._choice(index, self._shape.opening, '"finish_reason":null') for index in range(len(self._before))
        )

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        """New text of one choice, with the log-probabilities of its tokens when they were asked for."""
        if logprobs is None:
            return f"{self._before[index]}{_encode(text)}{self._after}".encode()
        content = f"{self._shape.before_text}{_encode(text)}{self._shape.after_text}"
        return self._choice(index, content, '"finish_reason":null', _encode(logprobs))

    def delta(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> bytes:
        """What is new in the message of one choice of a chat, whatever it is."""
        told = "null" if logprobs is None else _encode(logprobs)
        return self._choice(index, f'"delta":{_encode(delta)}', '"finish_reason":null', told)

    def finish(self, index: int, ending: Ending) -> bytes:
        """The last chunk of one choice."""
        finish = f'"finish_reason":"{ending.reason}","stop_reason":{_encode(ending.stop_reason)}'
        return self._choice(index, self._shape.closing, finish)

    def end(self, usage: UsageReply) -> bytes:
        """The chunk without choices that has the usage, for who asked for it, and the mark of the end."""
        if not self._include_usage:
            return DONE
        return f'{self._head}"choices":[],"usage":{usage.model_dump_json()}}}\n\n'.encode() + DONE

    def error(self, error: ApiError) -> bytes:
        """An error object, and no mark of the end, so that nobody takes it for one."""
        return event(error.body())

    def _choice(self, index: int, content: str, finish: str, logprobs: str = "null") -> bytes:
        choice = f'{{"index":{index},{content},"logprobs":{logprobs},{finish}}}'
        return f'{self._head}"choices":[{choice}]{self._tail}'.encode()

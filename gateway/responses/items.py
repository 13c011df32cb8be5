"""Puts the items of a response together from deltas of chat completions, and tells of it in events.

An item is open until another begins. Whole responses are put together by the same code, whose events nobody hears then.
"""

import uuid
from collections.abc import Iterator
from typing import Any, Literal

from gateway.output_reader import Delta

Event = tuple[str, dict[str, Any]]
"""Type and payload, without the number in the stream."""
Status = Literal["completed", "incomplete"]


class Items:
    """The output of one response.

    Attributes:
        output: all items, the open one last.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: _TextItem | _CallItem | None = None
        # Of tokens whose text has not come yet.
        self._logprobs: list[dict[str, Any]] = []

    def delta(self, delta: Delta, logprobs: dict[str, Any] | None = None) -> Iterator[Event]:
        """Takes in what is new."""
        if logprobs is not None:
            self._logprobs += logprobs["content"]
        for key, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if text := delta.get(key):
                if not isinstance(self._open, _TextItem) or self._open.kind != kind:
                    yield from self._begin(_TextItem(kind))
                assert self._open is not None
                told = [_logprob(entry) for entry in self._logprobs] if kind == "message" else []
                self._logprobs.clear()
                yield from self._placed(self._open.more(text, told))
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._begin(_CallItem(call["id"], function["name"]))
            assert isinstance(self._open, _CallItem)
            self._logprobs.clear()
            if function["arguments"]:
                yield from self._placed(self._open.more(function["arguments"]))

    def close(self, status: Status) -> Iterator[Event]:
        """Ends the last item. A response without any gets an empty message."""
        if self._open is None:
            yield from self._begin(_TextItem("message"))
        yield from self._end(status)

    def break_off(self) -> None:
        """The last item stays as far as it has come; there are no events of that."""
        if self._open is not None:
            list(self._open.done("incomplete"))
        self._open = None

    def _begin(self, item: "_TextItem | _CallItem") -> Iterator[Event]:
        yield from self._end("completed")
        self._open = item
        self.output.append(item.item)
        yield from self._placed(item.begin())

    def _end(self, status: Status) -> Iterator[Event]:
        if self._open is not None:
            yield from self._placed(self._open.done(status))
        self._open = None

    def _placed(self, events: Iterator[Event]) -> Iterator[Event]:
        for kind, payload in events:
            yield kind, {"output_index": len(self.output) - 1, **payload}


class _TextItem:
    """A message or reasoning: one part of text."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._name = "output_text" if kind == "message" else "reasoning_text"
        self._part: dict[str, Any] = {"type": self._name, "text": ""}
        self.item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            self._part |= {"annotations": [], "logprobs": []}
            self.item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
        else:
            self.item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": []}
        self._pieces: list[str] = []
        self._where = {"item_id": self.item["id"], "content_index": 0}

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"item": {**self.item, "content": []}}
        self.item["content"].append(self._part)
        yield "response.content_part.added", {**self._where, "part": dict(self._part)}

    def more(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        self._pieces.append(text)
        payload: dict[str, Any] = {**self._where, "delta": text}
        if self.kind == "message":
            self._part["logprobs"] += logprobs
            payload["logprobs"] = logprobs
        yield f"response.{self._name}.delta", payload

    def done(self, status: Status) -> Iterator[Event]:
        self._part["text"] = "".join(self._pieces)
        payload = {**self._where, "text": self._part["text"]}
        if self.kind == "message":
            payload["logprobs"] = self._part["logprobs"]
        yield f"response.{self._name}.done", payload
        yield "response.content_part.done", {**self._where, "part": self._part}
        self.item["status"] = status
        yield "response.output_item.done", {"item": self.item}


class _CallItem:
    """A call of a function."""

    def __init__(self, call_id: str, name: str) -> None:
        self._pieces: list[str] = []
        self.item: dict[str, Any] = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": call_id,
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"item": dict(self.item)}

    def more(self, arguments: str, logprobs: object = None) -> Iterator[Event]:
        self._pieces.append(arguments)
        yield "response.function_call_arguments.delta", {"item_id": self.item["id"], "delta": arguments}

    def done(self, status: Status) -> Iterator[Event]:
        self.item["arguments"] = "".join(self._pieces)
        done = {"item_id": self.item["id"], "name": self.item["name"], "arguments": self.item["arguments"]}
        yield "response.function_call_arguments.done", done
        self.item["status"] = status
        yield "response.output_item.done", {"item": self.item}


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """A token as this API has it: also where chat completions have no bytes."""
    return {"bytes": [], **entry}

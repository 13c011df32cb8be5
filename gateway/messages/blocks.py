"""Puts the content of a message together from deltas of chat completions, and tells of it in events.

A block is open until another begins. Whole messages are put together by the same code, whose events nobody hears then.
"""

import json
from collections.abc import Iterator
from typing import Any

from gateway.output_reader import Delta
from gateway.whole_characters import whole_characters

Event = tuple[str, dict[str, Any]]
"""Type and payload."""


class Blocks:
    """The content of one message.

    Attributes:
        content: all blocks, the open one last.
    """

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._kind = ""
        self._pieces: list[str] = []

    def delta(self, delta: Delta) -> Iterator[Event]:
        """Takes in what is new."""
        if text := delta.get("reasoning_content"):
            yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._more({"type": "thinking_delta", "thinking": text}, text)
        if text := delta.get("content"):
            yield from self._begin("text", {"type": "text", "text": ""})
            yield self._more({"type": "text_delta", "text": text}, text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self.close()
                block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                yield from self._begin("tool_use", block)
            if arguments := function["arguments"]:
                yield self._more({"type": "input_json_delta", "partial_json": arguments}, arguments)

    def close(self) -> Iterator[Event]:
        """Ends the open block, if there is one."""
        if not self._kind:
            return
        block, whole = self.content[-1], "".join(self._pieces)
        if self._kind == "tool_use":
            block["input"] = _object(whole)
        else:
            block[self._kind] = whole
        self._kind = ""
        self._pieces.clear()
        yield "content_block_stop", {"index": len(self.content) - 1}

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        """Opens a block, unless one of its kind is open."""
        if self._kind == kind:
            return
        yield from self.close()
        self._kind = kind
        self.content.append(block)
        yield "content_block_start", {"index": len(self.content) - 1, "content_block": dict(block)}

    def _more(self, delta: dict[str, Any], text: str) -> Event:
        self._pieces.append(text)
        return "content_block_delta", {"index": len(self.content) - 1, "delta": delta}


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call. What a limit has cut short, what is no object, or what has numbers that JSON has not is
    told as the text that it is."""
    try:
        shown = json.dumps(json.loads(text or "{}"), ensure_ascii=False, allow_nan=False)
        value = json.loads(whole_characters(shown))
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"partial_json": text}

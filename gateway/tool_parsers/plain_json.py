"""A reply that is nothing but calls: one JSON object, several of them, or a list. Llama 3 writes calls so."""

from gateway.text_machine import END, Reader
from gateway.tool_parsers.call_reader import ToolParser

_PYTHON_TAG = "<|python_tag|>"


class PlainJsonParser(ToolParser):
    """Reads calls at the beginning of the text, with semicolons, commas or whitespace between them."""

    @staticmethod
    def written(name: str, arguments: str) -> str:
        """A call in this format."""
        return f'{{"name": "{name}", "parameters": {arguments}}}'

    def _read(self) -> Reader[None]:
        if (yield from self._mark()):
            yield from self._calls()
        yield from self._rest()

    def _mark(self) -> Reader[bool]:
        """Whether calls may follow; leaves the character that they begin with to be read."""
        char = yield from self._next_visible()
        self._unget(char)
        if char == "<":
            for wanted in _PYTHON_TAG:
                char = yield from self._next()
                if char != wanted:
                    self._unget(char)
                    self._say_raw()
                    return False
            char = yield from self._next_visible()
            self._unget(char)
        if char and char in "{[":
            return True
        self._say_raw()
        return False

    def _calls(self) -> Reader[None]:
        """Calls, and what separates them."""
        char = yield from self._next_visible()
        if char != "[":
            self._unget(char)
        separators = ";," if char != "[" else ";,]"
        while True:
            if not (yield from self._call_or_text()):
                return
            while (char := (yield from self._next_visible())) and char in separators:
                pass
            self._unget(char)
            if char == END or char != "{":
                return
            self._raw.clear()

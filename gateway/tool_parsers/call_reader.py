"""Reads calls written as JSON objects, ``{"name": ..., "arguments": {...}}``: what all formats have in common."""

import json
from collections.abc import Collection

from gateway.parts import Arguments, CallStart, Content, Part
from gateway.text_machine import END, Reader, TextMachine
from gateway.whole_characters import whole_characters

_ARGUMENTS = ("arguments", "parameters")


class NotACall(Exception):
    """What was read is text; the character that did not fit is to be read again."""


class ToolParser(TextMachine):
    """Splits a text into content and calls.

    Once a call's name and the beginning of its arguments are known, the call is given out and what follows of it goes
    out as it comes, unchanged. Until then what turns out to be no call, or to name a tool that was not offered,
    becomes content.

    Args:
        names: of the tools that were offered.
        parallel: whether there may be several calls; all but the first are dropped otherwise.
    """

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        self._names = frozenset(names)
        self._parallel = parallel
        self._num_calls = 0
        super().__init__()

    @staticmethod
    def written(name: str, arguments: str) -> str:
        """A call in this format; ``arguments`` are a JSON object."""
        raise NotImplementedError

    def _rest(self) -> Reader[None]:
        """The rest of the text is content."""
        yield from self._until()
        self._end()

    def _end(self) -> None:
        """The text is over: whitespace at its end stays, unless calls came before it."""
        if self._space and not self._num_calls:
            self._parts.append(Content(self._space))

    def _call_or_text(self) -> Reader[bool]:
        """Reads a call; or makes content of all that was read since the last mark, and returns False."""
        try:
            yield from self._call()
        except NotACall:
            self._say_raw()
            return False
        self._raw.clear()
        return True

    def _say_raw(self) -> None:
        """What was read since the last mark is content."""
        self._say("".join(self._raw))
        self._raw.clear()

    def _begin(self, name: str) -> None:
        self._num_calls += 1
        self._space = ""
        self._emit(CallStart(name))

    def _emit(self, part: Part) -> None:
        if self._parallel or self._num_calls == 1:
            self._parts.append(part)

    def _call(self) -> Reader[None]:
        """One object. Raises NotACall."""
        yield from self._expect("{")
        name: str | None = None
        arguments: str | None = None
        begun = False
        try:
            while (char := (yield from self._next_visible())) != "}":
                if char == ",":
                    continue
                self._unget(char)
                key = yield from self._string()
                yield from self._expect(":")
                if key == "name":
                    name = yield from self._string()
                    if name not in self._names:
                        raise NotACall
                elif key in _ARGUMENTS and arguments is None and not begun:
                    char = yield from self._next_visible()
                    self._unget(char)
                    if name is not None and char == "{":
                        self._begin(name)
                        begun = True
                        yield from self._value(emit=True)
                    else:
                        arguments = _object((yield from self._value()))
                else:
                    yield from self._value()
        except NotACall:
            # What is given out cannot be taken back; a text that ends within a call is a call cut short.
            if not begun:
                raise
            return
        if name is None:
            raise NotACall
        if not begun:
            self._begin(name)
            self._emit(Arguments(arguments or "{}"))

    def _expect(self, wanted: str) -> Reader[None]:
        char = yield from self._next_visible()
        if char != wanted:
            self._unget(char)
            raise NotACall

    def _string(self) -> Reader[str]:
        """A JSON string's value."""
        char = yield from self._next_visible()
        if char != '"':
            self._unget(char)
            raise NotACall
        self._unget(char)
        text = yield from self._value()
        try:
            return whole_characters(str(json.loads(text)))
        except ValueError:
            raise NotACall from None

    def _value(self, *, emit: bool = False) -> Reader[str]:
        """The text of a JSON value: up to where its brackets close, or before what separates it from the next."""
        text: list[str] = []
        depth, in_string, escaped = 0, False, False
        first = yield from self._next_visible()
        self._unget(first)
        while True:
            char = yield from self._next()
            if char == END:
                self._unget(char)
                raise NotACall
            if not in_string and not depth and text and (char in ",}]" or char.isspace()):
                self._unget(char)
                return "".join(text)
            text.append(char)
            if emit:
                self._emit(Arguments(char))
            if in_string:
                if escaped:
                    escaped = False
                elif char == "\\":
                    escaped = True
                elif char == '"':
                    in_string = False
            elif char == '"':
                in_string = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
            if not depth and not in_string and first in '{["':
                return "".join(text)


def _object(text: str) -> str:
    """Arguments that came before the name, or in a string: the object's own text. Raises NotACall for other values."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text, value = whole_characters(value), json.loads(value)
    except (ValueError, RecursionError):
        raise NotACall from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise NotACall
    return text

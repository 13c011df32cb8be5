"""The state machine under all parsers of output: it takes a text in any pieces and gives the same parts for each cut.

A machine is written as a generator that yields wherever it needs the next character, so that its states are places in
its code. What it makes of the text depends on the characters alone, never on where a piece of the text ended.
"""

from collections.abc import Generator
from typing import TypeVar

from gateway.parts import Content, Part, Reasoning, joined

T = TypeVar("T")
Reader = Generator[None, str, T]
"""Is sent one character for each yield, and at last the empty string; returns T."""

END = ""


class TextMachine:
    """Reads one text. Subclasses write ``_read``, which returns when it has been sent END."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        # Whitespace that belongs to the text only if more text follows it.
        self._space = ""
        self._unread: list[str] = []
        # What was read since the last mark, for what turns out to be no call.
        self._raw: list[str] = []
        self._reader = self._read()
        next(self._reader)

    def push(self, text: str) -> list[Part]:
        """The parts that this piece of the text completes."""
        for char in text:
            self._reader.send(char)
        return self._take()

    def finish(self) -> list[Part]:
        """The parts that were held back; the text is over."""
        try:
            self._reader.send(END)
        except StopIteration:
            return self._take()
        raise AssertionError("the reader asked for more than the end")

    def _read(self) -> Reader[None]:
        raise NotImplementedError

    def _take(self) -> list[Part]:
        parts, self._parts = joined(self._parts), []
        return parts

    def _next(self) -> Reader[str]:
        """The next character."""
        char = self._unread.pop() if self._unread else (yield)
        self._raw.append(char)
        return char

    def _unget(self, char: str) -> None:
        """Lets ``_next`` give this character again."""
        self._unread.append(char)
        self._raw.pop()

    def _next_visible(self) -> Reader[str]:
        """The next character that is no whitespace."""
        while (char := (yield from self._next())).isspace():
            pass
        return char

    def _say(self, text: str, kind: type[Content] | type[Reasoning] = Content) -> None:
        """Gives text out, but for whitespace at its end."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._parts.append(kind(shown))

    def _until(self, *marks: str, kind: type[Content] | type[Reasoning] = Content) -> Reader[str]:
        """Gives text out up to the first of the marks, and returns that; or END, when there is none."""
        held = ""
        while True:
            char = yield from self._next()
            if char == END:
                self._say(held, kind)
                return END
            held += char
            while held and not any(mark.startswith(held) for mark in marks):
                self._say(held[0], kind)
                held = held[1:]
            if held in marks:
                self._raw = [held]
                return held
            if not held:
                self._raw.clear()

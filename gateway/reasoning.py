"""Tells the model's reasoning from its answer: ``<think> … </think>`` before it."""

from collections.abc import Iterable

from gateway.parts import Content, Reasoning
from gateway.text_machine import END, Reader, TextMachine

_OPEN, _CLOSE = "<think>", "</think>"


class ReasoningParser(TextMachine):
    """Splits a text into Reasoning and Content, without the marks and the whitespace around them.

    Args:
        opened: the text begins within the reasoning, since the chat template has written the opening mark; one at its
            beginning is dropped all the same. Else reasoning begins with the mark, and only at the text's beginning.
    """

    def __init__(self, opened: bool) -> None:
        self._opened = opened
        super().__init__()

    def _read(self) -> Reader[None]:
        if (yield from self._begins_with_mark()):
            if (yield from self._until(_CLOSE, kind=Reasoning)) == END:
                return
            self._space = ""
            self._unget((yield from self._next_visible()))
        yield from self._until()
        self._flush_space()

    def _begins_with_mark(self) -> Reader[bool]:
        """Whether the text begins with reasoning; leaves what is no mark to be read again, whitespace included."""
        read = ""
        while True:
            char = yield from self._next()
            read += char
            mark = read.lstrip()
            if mark == _OPEN:
                self._unget((yield from self._next_visible()))
                return True
            if char == END or not _OPEN.startswith(mark):
                break
        if self._opened:
            read = read.lstrip()
        if char == END:
            self._unread.append(END)
        self._unread += reversed(read)
        return self._opened

    def _flush_space(self) -> None:
        if self._space:
            self._parts.append(Content(self._space))


class ReasoningTokens:
    """Counts the tokens of one choice's reasoning by their bytes, those of its marks included.

    Args:
        opened: as for the parser.
    """

    def __init__(self, opened: bool) -> None:
        self._count = 0
        # Whether the text may yet begin with the mark, and may yet come to the end of the reasoning.
        self._undecided = not opened
        self._runs = True
        self._tail = b""

    @property
    def count(self) -> int:
        """Tokens so far. None while the text only might begin with the mark."""
        return 0 if self._undecided else self._count

    def take(self, tokens: Iterable[bytes]) -> None:
        """The next tokens."""
        for token in tokens:
            if not self._runs:
                return
            self._count += 1
            self._tail += token
            if self._undecided:
                self._tail = self._tail.lstrip()
                if _OPEN.encode().startswith(self._tail[: len(_OPEN)]):
                    self._undecided = len(self._tail) < len(_OPEN)
                else:
                    self._runs = False
            else:
                self._tail = self._tail[-len(_CLOSE) - len(token) :]
            self._runs = self._runs and _CLOSE.encode() not in self._tail


PARSERS = {"qwen3": False, "deepseek_r1": True}
"""By vLLM's names: whether the text begins within the reasoning."""


def reasoning_parser(name: str) -> ReasoningParser:
    """A parser for one choice, by its name in PARSERS."""
    return ReasoningParser(PARSERS[name])


def reasoning_tokens(name: str) -> ReasoningTokens:
    """What counts them in one choice, by the parser's name."""
    return ReasoningTokens(PARSERS[name])

"""Turns the tokens of one sequence into text as they come, and finds stop strings in it.

The pieces put together are exactly what decoding all tokens at once gives, however the tokens are cut.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character is at most four bytes, each possibly a token of its own; a longer run that still ends in a replacement
# character is not going to become whole.
_LONGEST_CHARACTER = 8


class Detokenizer(Protocol):
    """The text of one sequence, in pieces of whole characters."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def flush(self) -> str:
        """The text of an incomplete character at the end, as replacement characters."""


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes: constant time a token.

    Args:
        token_bytes: the bytes of each token id; empty for special tokens.
    """

    def __init__(self, token_bytes: list[bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._bytes
        return self._decoder.decode(b"".join([table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any vocabulary: decodes a short window twice and takes the difference, since a decoder may treat the first
    token of a text differently.

    Args:
        decode: all tokens to text, special tokens left out.
    """

    def __init__(self, decode: "Decode") -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text is out

    def push(self, token_ids: Sequence[int]) -> str:
        # One at a time, so that the pieces do not depend on the cut.
        return "".join([self._push(token_id) for token_id in token_ids])

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        whole = self._decode(self._window)
        if whole.endswith(_REPLACEMENT) and len(self._window) - self._read < _LONGEST_CHARACTER:
            return ""
        return self._advance(whole)

    def flush(self) -> str:
        return self._advance(self._decode(self._window)) if len(self._window) > self._read else ""

    def _advance(self, whole: str) -> str:
        piece = whole[len(self._decode(self._window[: self._read])) :]
        if piece:
            self._window = self._window[self._read :]
        self._read = len(self._window)
        return piece


class Decode(Protocol):
    """Token ids to text."""

    def __call__(self, token_ids: list[int], /) -> str: ...


class StopMatcher:
    """Holds back text that may become a stop string, and cuts at the first one that is complete.

    The stop string that is complete first wins; of two that are complete at the same character, the longer. So the
    result is the same for every way of cutting the text.

    Args:
        stops: the strings, none empty.
        include: keeps the matched string in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can go out; ``matched`` is set once a stop string was found, and nothing comes after it."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text held back, when the sequence ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Where the longest suffix begins that a stop string begins with."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            suffix = text[start:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return start
        return len(text)

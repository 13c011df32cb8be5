"""Banned patterns in two forms for RE2, which takes linear time: what matches, and what may yet become a match.

A stream must hold back a text that is the beginning of a match. All beginnings of a pattern's matches are a regular
language too: those of ``ab`` are those of ``a``, and ``a`` followed by those of ``b``. So both forms are written down
from the parsed pattern.
"""

import re
from collections.abc import Iterator, Sequence
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

import re2

MAX_PATTERNS = 256
MAX_PATTERN_CHARS = 1000
# Of one program; what needs more is refused.
_MAX_MEMORY = 8 * 1024 * 1024

_FLAGS = re.IGNORECASE | re.DOTALL | re.UNICODE
# As Python has them; RE2's own are ASCII's.
_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\p{Nd}",
    sre.CATEGORY_NOT_DIGIT: r"\P{Nd}",
    sre.CATEGORY_SPACE: r"\s\v\x{85}\p{Z}",
    sre.CATEGORY_WORD: r"\p{L}\p{N}_",
}
_NEGATED = {sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE, sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD}


class PatternError(ValueError):
    """A pattern cannot be watched for in a stream; the message says which, and why."""


class BannedPatterns:
    """Some patterns as one: letters, sets, groups, repetitions, alternatives, ``\\\\b`` and the flags i and s.

    Raises:
        PatternError: a pattern is wrong, matches nothing at all, or uses what would have to look back or ahead.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        if len(patterns) > MAX_PATTERNS:
            raise PatternError(f"there are {len(patterns)} patterns; at most {MAX_PATTERNS}")
        parsed = [_parse(pattern) for pattern in patterns]
        self._whole = _compile(parsed, "|".join(map(_Writer.whole, parsed)))
        self._begun = _compile(parsed, f"(?:{'|'.join(map(_Writer.begun, parsed))})\\z")

    def matches(self, text: str, start: int) -> Iterator[tuple[int, int]]:
        """Where matches in ``text[start:]`` begin and end, one after the other; what is before tells words' borders."""
        return (match.span() for match in self._whole.finditer(text, start))

    def may_begin(self, text: str, start: int) -> int:
        """Where the longest end of ``text[start:]`` begins that is the beginning of a match; if none is, the length."""
        begun: int = self._begun.search(text, start).start()
        return begun


def _parse(pattern: str) -> "_Writer":
    if not pattern or len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"a pattern has {len(pattern)} characters; it must have 1 to {MAX_PATTERN_CHARS}")
    try:
        parsed = sre_parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"{pattern!r} is no pattern: {error}") from error
    if parsed.getwidth()[0] == 0:
        raise PatternError(f"{pattern!r} matches the empty text, which is everywhere")
    if parsed.state.flags & ~_FLAGS:
        raise PatternError(f"{pattern!r} has a flag other than i and s")
    return _Writer(pattern, parsed)


def _compile(parsed: Sequence["_Writer"], source: str) -> Any:
    options = re2.Options()
    options.max_mem = _MAX_MEMORY
    options.log_errors = False
    try:
        return re2.compile(source, options)
    except re2.error as error:
        names = ", ".join(writer.pattern for writer in parsed)[:200]
        raise PatternError(f"RE2 refuses the patterns {names}: they are too large, or repeat too often") from error


class _Writer:
    """One parsed pattern, to be written down for RE2."""

    def __init__(self, pattern: str, parsed: Any) -> None:
        self.pattern = pattern
        self._parsed = parsed
        self._any = r"(?s:.)" if parsed.state.flags & re.DOTALL else r"[^\n]"
        self._flags = "(?i:" if parsed.state.flags & re.IGNORECASE else "(?:"

    def whole(self) -> str:
        """What matches."""
        return f"{self._flags}{self._sequence(self._parsed)})"

    def begun(self) -> str:
        """All beginnings of what matches, the empty one and the whole included."""
        return f"{self._flags}{self._beginnings(list(self._parsed))})"

    def _sequence(self, nodes: Any) -> str:
        return "".join(self._node(kind, value) for kind, value in nodes)

    def _node(self, kind: Any, value: Any) -> str:
        if kind is sre.LITERAL:
            return _char(value)
        if kind is sre.NOT_LITERAL:
            return f"[^{_char(value)}]"
        if kind is sre.ANY:
            return self._any
        if kind is sre.IN:
            return self._set(value)
        if kind is sre.BRANCH:
            return f"(?:{'|'.join(map(self._sequence, value[1]))})"
        if kind is sre.SUBPATTERN:
            self._check_flags(value)
            return f"(?:{self._sequence(value[3])})"
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, inner = value
            lazy = "?" if kind is sre.MIN_REPEAT else ""
            return f"(?:{self._sequence(inner)}){_times(least, most)}{lazy}"
        if kind is sre.AT and value in (sre.AT_BOUNDARY, sre.AT_NON_BOUNDARY):
            return r"\b" if value is sre.AT_BOUNDARY else r"\B"
        raise PatternError(f"{self.pattern!r} has {str(kind).lower()}, which cannot be watched for in a stream")

    def _beginnings(self, nodes: list[tuple[Any, Any]]) -> str:
        """Of a sequence: those of its first part, or all of that and those of the rest."""
        if not nodes:
            return ""
        first, *rest = nodes
        after = self._beginnings(rest)
        whole = self._sequence([first])
        if first[0] in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN, sre.AT):
            return f"(?:{whole}{after})?"
        return f"(?:{self._node_beginnings(*first)}|{whole}{after})"

    def _node_beginnings(self, kind: Any, value: Any) -> str:
        if kind is sre.BRANCH:
            return f"(?:{'|'.join(self._beginnings(list(branch)) for branch in value[1])})"
        if kind is sre.SUBPATTERN:
            return self._beginnings(list(value[3]))
        _, most, inner = value
        before = f"(?:{self._sequence(inner)}){_times(0, most if most is sre.MAXREPEAT else most - 1)}" if most else ""
        return f"{before}{self._beginnings(list(inner))}"

    def _set(self, entries: Any) -> str:
        negated = entries[0][0] is sre.NEGATE
        entries = entries[1:] if negated else entries
        # RE2 has no name for what they leave out, so that each is a set of its own.
        outer = [_CATEGORIES[_NEGATED[value]] for kind, value in entries if kind is sre.CATEGORY and value in _NEGATED]
        inner = "".join(self._entry(kind, value) for kind, value in entries if value not in _NEGATED)
        if not outer:
            return f"[{'^' if negated else ''}{inner}]"
        if not negated:
            return f"(?:{'|'.join([*(f'[^{left_out}]' for left_out in outer), *([f'[{inner}]'] if inner else [])])})"
        if inner or len(outer) > 1:
            raise PatternError(f"{self.pattern!r} has [^...] with \\W or \\S beside others; write what is in it")
        return f"[{outer[0]}]"

    def _entry(self, kind: Any, value: Any) -> str:
        if kind is sre.LITERAL:
            return _char(value)
        if kind is sre.RANGE:
            return f"{_char(value[0])}-{_char(value[1])}"
        if kind is sre.CATEGORY and value in _CATEGORIES:
            return _CATEGORIES[value]
        raise PatternError(f"{self.pattern!r} has {str(value).lower()}, which cannot be watched for in a stream")

    def _check_flags(self, value: Any) -> None:
        if value[1] or value[2]:
            raise PatternError(f"{self.pattern!r} has flags for a group; flags stand at the beginning, for all of it")


def _char(code: int) -> str:
    return f"\\x{{{code:x}}}"


def _times(least: int, most: Any) -> str:
    return f"{{{least},{'' if most is sre.MAXREPEAT else most}}}"

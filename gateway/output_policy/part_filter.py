"""Applies a policy once more to what parsers made of a filtered text: the arguments of calls, and text around calls.

Arguments are JSON. They are written with escapes that whoever gets them undoes, and parsers undo some themselves; text
before and after a call is one content again. So both are held back until it is known what they come to.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gateway.output_policy.text_filter import CompiledPolicy, TextFilter
from gateway.parts import Arguments, CallStart, Content, Part
from gateway.whole_characters import whole_characters

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class PartFilter:
    """Filters the parts of one choice. Nothing of a call is given out before all of it has been looked at.

    A call with a match ends the output; where the policy redacts, its strings are redacted instead, or the call is left
    out if that is not enough, as in one that is cut short.

    Attributes:
        matched: a banned pattern has been found.
        ended: nothing more is let through.
    """

    def __init__(self, policy: CompiledPolicy) -> None:
        # The whole text's length is the text's filter's to count.
        self._policy = replace(policy, max_chars=None)
        self._content = TextFilter(self._policy)
        self._name: str | None = None
        self._arguments: list[str] = []
        # Calls that are through, and wait for the text before them.
        self._ready: list[Part] = []
        self.matched = False
        self.ended = False

    def push(self, parts: list[Part]) -> list[Part]:
        """What can be let through now."""
        through: list[Part] = []
        for part in parts:
            if self.ended:
                break
            if isinstance(part, Arguments):
                self._arguments.append(part.text)
                continue
            through += self._end_call()
            if isinstance(part, CallStart):
                self._name = part.name
            elif isinstance(part, Content):
                through += self._text(self._content.push(part.text))
            else:
                through.append(part)
        return through

    def finish(self) -> list[Part]:
        """What was held back; the output is over."""
        through = self._end_call()
        if not self.ended:
            through += self._text(self._content.finish())
        return through

    def _text(self, text: str) -> list[Part]:
        """Text that is through, and the calls that waited for it."""
        self.matched |= self._content.matched
        self.ended |= self._content.ended
        return [*([Content(text)] if text else []), *self._released()]

    def _released(self) -> list[Part]:
        if self._content.pending or self.ended:
            return []
        ready, self._ready = self._ready, []
        return ready

    def _end_call(self) -> list[Part]:
        """The call that has been collected, if it may be seen."""
        if self._name is None or self.ended:
            return []
        name, text = self._name, "".join(self._arguments)
        self._name = None
        self._arguments.clear()
        shown: str | None = text
        if self._has_match(name) or any(map(self._has_match, _readings(text))):
            self.matched = True
            self.ended = not self._policy.redacts
            shown = self._redacted(text) if self._policy.redacts and not self._has_match(name) else None
        if shown is not None:
            self._ready += [CallStart(name), Arguments(shown)]
        return self._released()

    def _has_match(self, text: str) -> bool:
        one = TextFilter(self._policy)
        one.push(text)
        one.finish()
        return one.matched

    def _redacted(self, text: str) -> str | None:
        """Arguments with their strings redacted; None when that leaves a match, or they are no JSON."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        shown = json.dumps(self._redacted_value(value), ensure_ascii=False)
        return None if any(map(self._has_match, _readings(shown))) else shown

    def _redacted_value(self, value: Any) -> Any:
        if isinstance(value, str):
            one = TextFilter(self._policy)
            return one.push(value) + one.finish()
        if isinstance(value, list):
            return [self._redacted_value(item) for item in value]
        if isinstance(value, dict):
            return {self._redacted_value(key): self._redacted_value(item) for key, item in value.items()}
        return value


def _readings(text: str) -> Iterator[str]:
    """A JSON text, also one that is cut short, as those who get it may read it: as it is, decoded, and written anew."""
    yield text
    # Every key and string is somewhere in it, those of repeated keys included, each between marks that are no words.
    yield _decoded(text)
    try:
        yield _decoded(json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")))
    except (ValueError, RecursionError):
        return


def _decoded(text: str) -> str:
    """The text without escapes. Half a surrogate pair is no character, and becomes U+FFFD."""
    plain = _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else _SHORT.get(match[2], match[2]), text)
    return whole_characters(plain)

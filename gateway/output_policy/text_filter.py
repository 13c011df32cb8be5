"""Filters one choice's text as it comes: no part of a match is ever let through, wherever the text is cut."""

from dataclasses import dataclass

from gateway.output_policy.pattern import BannedPatterns
from protos.api_keys import OutputPolicy

REDACTED = "[redacted]"
# Characters that may become a match. More of them count as one: they can be neither shown nor kept for ever.
MAX_HELD_CHARS = 4096


@dataclass(frozen=True)
class CompiledPolicy:
    """A policy that is ready to be applied. ``patterns`` is None when nothing is banned."""

    patterns: BannedPatterns | None
    redacts: bool
    max_chars: int | None

    @classmethod
    def of(cls, policy: OutputPolicy) -> "CompiledPolicy":
        """Compiles a policy. Raises PatternError."""
        patterns = BannedPatterns(policy.banned_patterns) if policy.banned_patterns else None
        return cls(patterns, policy.on_match == "redact", policy.max_chars)


class TextFilter:
    """Filters one text.

    Attributes:
        matched: a banned pattern has been found.
        ended: nothing more is let through.
    """

    def __init__(self, policy: CompiledPolicy) -> None:
        self._policy = policy
        self.matched = False
        self.ended = False
        # What is held back, after a character that was there before it: words begin and end by their neighbours.
        self._context = ""
        self._held = ""
        self._left = policy.max_chars

    @property
    def pending(self) -> bool:
        """Whether something is held back."""
        return bool(self._held) and not self.ended

    def push(self, text: str) -> str:
        """What can be let through now."""
        return self._limited(self._through(text, is_last=False))

    def finish(self) -> str:
        """What was held back; the text is over."""
        return self._limited(self._through("", is_last=True))

    def _through(self, new: str, is_last: bool) -> str:
        patterns = self._policy.patterns
        if self.ended:
            return ""
        if patterns is None:
            return new
        passed: list[str] = []
        text, start = self._context + self._held + new, len(self._context)
        hold = len(text) if is_last else patterns.may_begin(text, start)
        for begin, end in patterns.matches(text, start):
            # What is pending there or before it may come to another match, an earlier or a longer one.
            if begin >= hold:
                break
            self.matched = True
            passed.append(text[start:begin])
            if not self._policy.redacts:
                self.ended = True
                return "".join(passed)
            passed.append(REDACTED)
            start = end
            if hold < end:
                hold = patterns.may_begin(text, end)
        passed.append(text[start:hold])
        self._held, self._context = text[hold:], text[max(0, hold - 1) : hold]
        if len(self._held) > MAX_HELD_CHARS:
            self.matched = self.ended = True
        return "".join(passed)

    def _limited(self, text: str) -> str:
        if self._left is None:
            return text
        shown = text[: self._left]
        self._left -= len(shown)
        self.ended = self.ended or len(shown) < len(text)
        return shown

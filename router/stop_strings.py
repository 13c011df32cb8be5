"""Finds the first stop string in text that arrives in pieces, and holds back what may yet become one.

The automaton of Aho and Corasick: its state is the longest end of the text that begins a stop string. So the answer
does not depend on how the text was cut, and each character is looked at once. The match that ends first wins; of those
that end at one character, the longest.
"""

import functools
import re
from dataclasses import dataclass


class StopPatterns:
    """The automaton for one set of stop strings; shared by all sequences that have them."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        # The longest stop string that ends in a state; empty: none.
        self.match = [""]
        self.fallback = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        # Text before the first of these characters is skipped at the speed of re.
        self.first = re.compile("[" + "".join(map(re.escape, self.next[0])) + "]")

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            known = self.next[state].get(character)
            if known is None:
                known = self.next[state][character] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append("")
                self.fallback.append(0)
            state = known
        self.match[state] = stop

    def _link(self) -> None:
        """Breadth first: a state falls back to the longest other state that ends as it does."""
        layer = list(self.next[0].values())
        while layer:
            following = []
            for state in layer:
                for character, child in self.next[state].items():
                    self.fallback[child] = self.step(self.fallback[state], character)
                    self.match[child] = self.match[child] or self.match[self.fallback[child]]
                    following.append(child)
            layer = following

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self.next[state]:
            state = self.fallback[state]
        return self.next[state].get(character, 0)


@functools.lru_cache(maxsize=256)
def compile_stops(stops: tuple[str, ...]) -> StopPatterns:
    """The automaton for these strings; clients send the same few again and again."""
    return StopPatterns(stops)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        before: text to show that was not shown yet, up to the stop string.
        stop: the string.
        end: how many characters of the piece last pushed belong to the match or lie before it.
    """

    before: str
    stop: str
    end: int


class StopMatcher:
    """Follows the text of one sequence."""

    __slots__ = ("_held", "_patterns", "_state")

    def __init__(self, patterns: StopPatterns) -> None:
        self._patterns = patterns
        self._state = 0
        self._held = ""

    def push(self, text: str) -> "str | StopMatch":
        """Takes the next piece. Returns what may be shown now, or the match; after a match, push no more."""
        patterns, state = self._patterns, self._state
        position, length = 0, len(text)
        while position < length:
            if not state:
                found = patterns.first.search(text, position)
                if found is None:
                    break
                position = found.start()
            state = patterns.step(state, text[position])
            position += 1
            stop = patterns.match[state]
            if stop:
                shown = self._held + text[:position]
                return StopMatch(shown[: len(shown) - len(stop)], stop, position)
        return self._show(text, state)

    def pass_over(self, text: str) -> str:
        """Takes the next piece, in which no stop string may end; one that begins in it may end later. As ``push``."""
        patterns, state = self._patterns, self._state
        for character in text:
            state = patterns.step(state, character)
        while state and not patterns.next[state]:
            state = patterns.fallback[state]  # a stop string that was passed over becomes no other one
        return self._show(text, state)

    def _show(self, text: str, state: int) -> str:
        """Holds back what may yet become a stop string, and returns the rest."""
        self._state = state
        text = self._held + text
        held = self._patterns.depth[state]
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What is still held: the sequence ended, so it becomes no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

"""Turns one sequence's token ids into text as they come: whole characters, and nothing after a stop string."""

from codecs import utf_8_decode

from router.stop_strings import StopMatch, StopMatcher, StopPatterns
from router.token_bytes import TokenBytes


class Detokenizer:
    """The text of one sequence.

    However the ids are cut into pieces, the texts together are the text of all ids: bytes of an incomplete character
    are kept until it is whole, and what may become a stop string is kept until it is decided.

    Args:
        token_bytes: the tokenizer's table.
        stops: the stop strings, or None.
        keep_stop: a stop string stays at the end of the text.
        min_tokens: no stop string counts that ends within the text of this many first tokens.
    """

    __slots__ = ("_keep_stop", "_matcher", "_min_tokens", "_num_tokens", "_rest", "_token_bytes", "stop_string")

    def __init__(
        self,
        token_bytes: TokenBytes,
        stops: StopPatterns | None = None,
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = token_bytes
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._matcher = None if stops is None else StopMatcher(stops)
        self._keep_stop = keep_stop
        # The first bytes of an incomplete character.
        self._rest = b""
        # The stop string that ended the text.
        self.stop_string: str | None = None

    def push(self, token_ids: list[int]) -> tuple[str, int]:
        """Takes the next ids.

        Returns:
            Text to show, and how many of the ids belong to the sequence: all, unless a stop string ended it. Then
            ``stop_string`` is set, and push must not be called again.
        """
        count = len(token_ids)
        if self._matcher is None:
            return self._decode(token_ids), count
        passed = ""
        if self._num_tokens < self._min_tokens:
            first = self._min_tokens - self._num_tokens
            passed = self._matcher.pass_over(self._decode(token_ids[:first]))
            token_ids = token_ids[first:]
        self._num_tokens += count
        before = self._rest
        shown = self._matcher.push(self._decode(token_ids))
        if isinstance(shown, str):
            return passed + shown, count
        used = count - len(token_ids) + self._count_until(before, token_ids, shown.end)
        return passed + self._stopped(shown), used

    def flush(self, *, is_cut: bool = False) -> str:
        """The sequence ended: the rest of its text. May find a stop string in it, as ``push`` does.

        What a model left incomplete is U+FFFD; where a limit has cut it (``is_cut``), it would have been completed, and
        is left out.
        """
        text = "" if is_cut else utf_8_decode(self._rest, "replace", True)[0]
        self._rest = b""
        if self._matcher is None:
            return text
        if self._num_tokens <= self._min_tokens:
            return self._matcher.pass_over(text) + self._matcher.flush()
        shown = self._matcher.push(text)
        return self._stopped(shown) if isinstance(shown, StopMatch) else shown + self._matcher.flush()

    def _decode(self, token_ids: list[int]) -> str:
        """The characters that these ids complete."""
        data = self._rest + self._token_bytes.join(token_ids)
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def _stopped(self, match: StopMatch) -> str:
        self.stop_string = match.stop
        self._rest = b""
        return match.before + match.stop if self._keep_stop else match.before

    def _count_until(self, rest: bytes, token_ids: list[int], end: int) -> int:
        """How many ids it takes to make the first ``end`` characters."""
        characters = 0
        for index, token_id in enumerate(token_ids):
            data = rest + self._token_bytes.join([token_id])
            text, used = utf_8_decode(data, "replace", False)
            rest = data[used:]
            characters += len(text)
            if characters >= end:
                return index + 1
        return len(token_ids)

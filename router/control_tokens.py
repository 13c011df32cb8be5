"""Keeps turn marks that a client wrote apart from those that the chat template writes.

Before a chat is rendered, marks in the client's words are broken by a secret string. What the template writes is then
the only text that still matches a mark. Each of these is replaced by a secret name, the secret string is taken out
again, and the text is encoded by a copy of the tokenizer that knows the secret names alone: to it, a mark in the
client's words is text like any other, and everything else is encoded as ever.

The secrets are new in each process and never leave it, so no client can write them.
"""

import json
import re
import secrets
import threading
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

# Private-use characters: no template trims them, no normalizer changes them.
_PRIVATE_USE = range(0xE000, 0xF900)
_SECRET_CHARACTERS = 12


class ControlTokens:
    """The control tokens of one tokenizer: those it calls special.

    A token of a single character cannot be broken and counts as text of the template; no known model has one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        self._names = {token: _secret() for token in special if len(token) > 1}
        self._break = _secret()
        self._plain = tokenizer
        firsts = "".join(re.escape(first) for first in sorted({token[0] for token in self._names}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")
        # The longest first, as the tokenizer matches them. Models have up to thousands of tokens of few lengths.
        self._lengths = sorted({len(token) for token in self._names}, reverse=True)
        self._longest = max(self._lengths, default=0)
        self._heads = frozenset(token[:cut] for token in self._names for cut in range(1, len(token)))
        self._tails = frozenset(token[cut:] for token in self._names for cut in range(1, len(token)))
        self._lock = threading.Lock()
        self._secretive: Tokenizer | None = None

    def guard(self, text: str) -> str:
        """The client's words with every control token in them broken, also one that their neighbours might complete."""
        pieces: list[str] = []
        start = 0
        for match in self._first.finditer(text):
            if self._token_at(text, match.start()):
                pieces += (text[start : match.end()], self._break)
                start = match.end()
        text = "".join((*pieces, text[start:]))
        # Templates trim; what is at the ends then matters.
        inner = text.strip()
        if self._begins_with_tail(inner):
            cut = len(text) - len(text.lstrip())
            text = text[:cut] + self._break + text[cut:]
        if self._ends_with_head(inner):
            cut = len(text.rstrip())
            text = text[:cut] + self._break + text[cut:]
        return text

    def _token_at(self, text: str, start: int) -> str:
        """The longest control token that begins there; empty when none does."""
        return next((text[start : start + n] for n in self._lengths if text[start : start + n] in self._names), "")

    def _begins_with_tail(self, text: str) -> bool:
        return any(text[:length] in self._tails for length in range(1, self._longest))

    def _ends_with_head(self, text: str) -> bool:
        return any(text[len(text) - length :] in self._heads for length in range(1, min(self._longest, len(text) + 1)))

    def unguard(self, text: str) -> str:
        """Undoes ``guard``."""
        return text.replace(self._break, "")

    def encode(self, rendered: str) -> list[int]:
        """The ids of a rendered chat whose client's words were guarded."""
        named = self.unguard(self._name_tokens(rendered))
        with self._lock:
            if self._secretive is None:
                self._secretive = _renamed(self._plain, self._names)
        ids: list[int] = self._secretive.encode(named, add_special_tokens=False).ids
        return ids

    def _name_tokens(self, rendered: str) -> str:
        """Every whole control token by its secret name."""
        pieces: list[str] = []
        start = 0
        for match in self._first.finditer(rendered):
            if match.start() >= start and (token := self._token_at(rendered, match.start())):
                pieces += (rendered[start : match.start()], self._names[token])
                start = match.start() + len(token)
        return "".join((*pieces, rendered[start:]))


def _secret() -> str:
    return "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(_SECRET_CHARACTERS))


def _renamed(tokenizer: Tokenizer, names: dict[str, str]) -> Tokenizer:
    """A copy of the tokenizer in which tokens have other names and the same ids."""
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    spec["post_processor"] = None
    model = spec["model"]
    model["vocab"] = _renamed_vocabulary(model["vocab"], names)
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))


def _renamed_vocabulary(vocabulary: Any, names: dict[str, str]) -> Any:
    if isinstance(vocabulary, dict):
        return {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    entries: Iterable[tuple[str, float]] = vocabulary  # a Unigram model lists its pieces with their scores
    return [[names.get(piece, piece), score] for piece, score in entries]

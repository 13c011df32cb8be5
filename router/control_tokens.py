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
        self._tokens = sorted({token for token in special if len(token) > 1}, key=len, reverse=True)
        self._plain = tokenizer
        # The longest first, as the tokenizer matches them.
        alternatives = "|".join(map(re.escape, self._tokens)) or "(?!)"
        self._any = re.compile(alternatives)
        self._starts = re.compile(f"(?=({alternatives}))")
        self._heads = frozenset(token[:cut] for token in self._tokens for cut in range(1, len(token)))
        self._tails = frozenset(token[cut:] for token in self._tokens for cut in range(1, len(token)))
        self._longest = max(map(len, self._tokens), default=0)
        self._break = _secret()
        self._names = {token: _secret() for token in self._tokens}
        self._lock = threading.Lock()
        self._secretive: Tokenizer | None = None

    def guard(self, text: str) -> str:
        """The client's words with every control token in them broken, also one that their neighbours might complete."""
        for match in reversed(list(self._starts.finditer(text))):
            cut = match.start() + 1
            text = text[:cut] + self._break + text[cut:]
        # Templates trim; what is at the ends then matters.
        inner = text.strip()
        if self._begins_with_tail(inner):
            cut = len(text) - len(text.lstrip())
            text = text[:cut] + self._break + text[cut:]
        if self._ends_with_head(inner):
            cut = len(text.rstrip())
            text = text[:cut] + self._break + text[cut:]
        return text

    def _begins_with_tail(self, text: str) -> bool:
        return any(text[:length] in self._tails for length in range(1, self._longest))

    def _ends_with_head(self, text: str) -> bool:
        return any(text[len(text) - length :] in self._heads for length in range(1, min(self._longest, len(text) + 1)))

    def unguard(self, text: str) -> str:
        """Undoes ``guard``."""
        return text.replace(self._break, "")

    def encode(self, rendered: str) -> list[int]:
        """The ids of a rendered chat whose client's words were guarded."""
        named = self._any.sub(lambda match: self._names[match[0]], rendered)
        with self._lock:
            if self._secretive is None:
                self._secretive = _renamed(self._plain, self._names)
        ids: list[int] = self._secretive.encode(self.unguard(named), add_special_tokens=False).ids
        return ids


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

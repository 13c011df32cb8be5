"""What text each of a model's tokens stands for, as grammars need it. Encodes nothing: that is the router's."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.token_bytes import UnknownDecoder, token_converter

# What tokenizer.json would say of the two kinds of vocabulary in GGUF files (tokenizer.ggml.model).
_GGUF_DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"type": "ByteLevel"},
    "llama": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        ],
    },
}  # fmt: skip
# tokenizer.ggml.token_type: unknown and control tokens stand for no text.
_GGUF_SPECIAL = (2, 3)


class VocabularyError(ValueError):
    """A model has no vocabulary that can be read; the message names the file."""


@dataclass(frozen=True)
class Vocabulary:
    """All tokens of a model.

    Attributes:
        tokens: bytes by id; of special tokens, the name. Empty for ids without a token.
        special: ids of tokens that are not text.
    """

    tokens: list[bytes]
    special: frozenset[int]


def folder_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a folder's tokenizer.json. Raises VocabularyError when there is none that can be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise VocabularyError(f"{folder} has no tokenizer.json")

    def read() -> Vocabulary:
        raw = json.loads(path.read_text(encoding="utf-8"))
        entries = raw["model"]["vocab"]
        if isinstance(entries, list):  # a Unigram model lists its pieces with their scores
            entries = {piece: token_id for token_id, (piece, _) in enumerate(entries)}
        added = raw.get("added_tokens") or []
        entries = {**entries, **{token["content"]: token["id"] for token in added}}
        special = {token["id"] for token in added if token["special"]}
        return _vocabulary(entries, special, raw.get("decoder"))

    return _checked(read, path)


def gguf_vocabulary(fields: Mapping[str, Any], path: Path) -> Vocabulary:
    """The vocabulary in the fields of a GGUF file. Raises VocabularyError when there is none that can be read."""

    def read() -> Vocabulary:
        kind = fields["tokenizer.ggml.model"].contents()
        if kind not in _GGUF_DECODERS:
            raise VocabularyError(f"{path} has a vocabulary of type {kind!r}; supported: {', '.join(_GGUF_DECODERS)}")
        tokens = fields["tokenizer.ggml.tokens"].contents()
        types = fields["tokenizer.ggml.token_type"].contents() if "tokenizer.ggml.token_type" in fields else []
        special = {token_id for token_id, token_type in enumerate(types) if token_type in _GGUF_SPECIAL}
        return _vocabulary({token: token_id for token_id, token in enumerate(tokens)}, special, _GGUF_DECODERS[kind])

    return _checked(read, path)


def _checked(read: Callable[[], Vocabulary], path: Path) -> Vocabulary:
    try:
        return read()
    except (VocabularyError, UnknownDecoder) as error:
        raise VocabularyError(f"{path}: {error}") from error
    except (OSError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise VocabularyError(f"{path} has no readable vocabulary ({type(error).__name__}: {error})") from error


def _vocabulary(entries: Mapping[str, int], special: set[int], decoder: dict[str, Any] | None) -> Vocabulary:
    convert, _ = token_converter(decoder)
    tokens = [b""] * (max(entries.values()) + 1)
    for token, token_id in entries.items():
        tokens[token_id] = token.encode() if token_id in special else convert(token)
    return Vocabulary(tokens, frozenset(special))

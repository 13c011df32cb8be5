"""The bytes that each token id stands for, worked out once from the tokenizer's own description of its decoder.

With this table, turning ids into text is joining bytes and decoding UTF-8: fast, and independent of how the ids are
cut into pieces. Knows nothing of sequences.
"""

import copy
import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from router.config import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for the 256 bytes: printable ones as they are, others from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenBytes:
    """The bytes of every token.

    Attributes:
        table: bytes by id; empty for special tokens, which are not text, and for ids without a token.
        special: what special tokens are written as.
        leading: a prefix that the tokenizer puts before every text, and that whole texts are shown without.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError when the tokenizer's decoder is of a kind that this router does not know."""
        decoder = json.loads(tokenizer.to_str())["decoder"]
        convert, self.leading = _compile(decoder)
        added = tokenizer.get_added_tokens_decoder()
        self.special = {token_id: token.content.encode() for token_id, token in added.items() if token.special}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.table: list[bytes] = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            if token_id not in self.special:
                self.table[token_id] = convert(token)

    def join(self, token_ids: list[int]) -> bytes:
        """The bytes of the tokens together. Ids beyond the table have none."""
        table = self.table
        try:
            return b"".join([table[token_id] for token_id in token_ids])
        except IndexError:  # a model's vocabulary may be padded beyond the tokenizer's
            size = len(table)
            return b"".join([table[token_id] for token_id in token_ids if token_id < size])

    def with_special(self) -> "TokenBytes":
        """A copy in which special tokens are text like others."""
        copied = copy.copy(self)
        copied.table = [self.special.get(token_id, data) for token_id, data in enumerate(self.table)]
        return copied

    def shown(self, token_id: int) -> bytes:
        """What one token is written as, special tokens included."""
        return self.special.get(token_id) or self.join([token_id])

    def text(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; what is not UTF-8 is replaced by U+FFFD."""
        if skip_special_tokens or self.special.keys().isdisjoint(token_ids):
            data = self.join(token_ids)
        else:
            data = b"".join(map(self.shown, token_ids))
        return data.removeprefix(self.leading).decode("utf-8", "replace")


def _compile(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bytes]:
    """A function from a token to its bytes, and the prefix that whole texts lose."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replacements: list[tuple[str, str]] = []
    byte_level = byte_fallback = False
    leading = ""
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replacements.append((old, new))
            case {"type": "Strip", "content": content, "start": start, "stop": 0}:
                leading = content * start
            case {"type": "Metaspace", "replacement": old}:
                replacements.append((old, " "))
                leading = "" if step.get("prepend_scheme") == "never" else " "
            case _:
                raise ConfigError(
                    f"the tokenizer's decoder {step.get('type')!r} is not supported; supported are byte-level BPE and "
                    "SentencePiece (Replace, ByteFallback, Fuse, Strip at the start, Metaspace)"
                )
    if byte_level:
        return _byte_level, b""

    def convert(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return convert, leading.encode()


_ALPHABET = byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token that is written as plain text
        return token.encode()

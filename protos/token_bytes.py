"""The rule that turns a token, as a vocabulary writes it, into the bytes that it stands for.

The router turns ids into text by it, the worker follows a grammar by it: were they to differ, output would be held to a
grammar in one reading and shown in another.
"""

import re
from collections.abc import Callable
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnknownDecoder(ValueError):
    """The tokenizer's decoder is of a kind that the rule does not cover; the message names it."""


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for the 256 bytes: printable ones as they are, others from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def token_converter(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], bytes]:
    """Reads a decoder as tokenizer.json describes it.

    Returns:
        A function from a token to its bytes, and the prefix that whole texts lose.

    Raises:
        UnknownDecoder: it is neither byte-level BPE nor SentencePiece.
    """
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
                raise UnknownDecoder(
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

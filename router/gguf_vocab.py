"""Builds a tokenizer from the vocabulary inside a GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

_CONTROL = 3
_USER_DEFINED = 4

# The pre-tokenizers' published regular expressions, by ``tokenizer.ggml.pre``.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST


class UnsupportedVocabulary(ValueError):
    """The file's tokenizer is of a kind that is not built; the message names it."""


@dataclass(frozen=True)
class GGUFVocabulary:
    """What a GGUF file says about text.

    Attributes:
        tokenizer: encodes and decodes.
        chat_template: Jinja, or None.
        bos_token, eos_token: texts of these tokens, or "".
        eos_token_ids: tokens that end the model's turn.
        add_bos: whether every text begins with the bos token.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    bos_token: str
    eos_token: str
    eos_token_ids: tuple[int, ...]
    add_bos: bool


def read_gguf_vocabulary(path: Path) -> GGUFVocabulary:
    """Reads the metadata of a GGUF file.

    Raises:
        UnsupportedVocabulary: its tokenizer is not byte-level BPE with a known pre-tokenizer.
        OSError, ValueError: the file is missing or damaged.
    """
    reader = gguf.GGUFReader(path)

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(f"tokenizer.{key}")
        return default if found is None else found.contents()

    model, pre = field("ggml.model"), field("ggml.pre", "default")
    if model != "gpt2":
        raise UnsupportedVocabulary(
            f"{path}: tokenizer type {model!r} is not supported in GGUF files (supported: gpt2); "
            "give --tokenizer a folder with the model's tokenizer.json"
        )
    tokens: list[str] = field("ggml.tokens")
    kinds: list[int] = field("ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in field("ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, path)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    defined = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in defined])

    ends = [field(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    bos = field("ggml.bos_token_id")
    return GGUFVocabulary(
        tokenizer=tokenizer,
        chat_template=field("chat_template"),
        bos_token=tokens[bos] if bos is not None else "",
        eos_token=tokens[ends[0]] if ends[0] is not None else "",
        eos_token_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
        add_bos=bool(field("ggml.add_bos_token", False)),
    )


def _pre_tokenizer(name: str, path: Path) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match name:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case "default" | "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "llama-bpe" | "llama3" | "llama-v3":
            pattern = _LLAMA3
        case "qwen2":
            pattern = _QWEN2
        case _:
            raise UnsupportedVocabulary(
                f"{path}: pre-tokenizer {name!r} is not known (known: smollm, gpt-2, llama-bpe, qwen2); "
                "give --tokenizer a folder with the model's tokenizer.json"
            )
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])

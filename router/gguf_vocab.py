"""Builds a tokenizer from the vocabulary in a GGUF file. Touches no tensor.

A GGUF file names its pre-tokenizer (``tokenizer.ggml.pre``) and leaves the regular expressions to the reader; those
here are the ones that the models' own tokenizer.json files have.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

from protos.gguf_reader import FastGGUFReader
from router.config import ConfigError
from router.tokenizer import TokenizerFiles

# tokenizer.ggml.token_type
_CONTROL = 3
_USER_DEFINED = 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = rf"{_CONTRACTIONS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True)
class _Split:
    """How text is cut before BPE: by each pattern in turn.

    Attributes:
        whole_words: a piece that is a token is taken as it is, without merging.
        nfc: text is normalized first.
        bos: whether a begin-of-text token is added, where the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    bos: bool = False


_DIGITS_APART = _Split((r"\p{N}", _GPT2))
_LLAMA3_SPLIT = _Split((_LLAMA3,), whole_words=True, bos=True)
_SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "olmo", "mpt"), _Split((_GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "granite-code"), _DIGITS_APART
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3_SPLIT),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Split((_QWEN2,), nfc=True)),
    "stablelm2": _Split((_QWEN2,)),
    "qwen35": _Split((_QWEN35,), nfc=True),
    "gpt-4o": _Split((_GPT4O,)),
    "tekken": _Split((_TEKKEN,), whole_words=True, bos=True),
    "deepseek-v3": _Split((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}


def read_gguf(path: Path) -> TokenizerFiles:
    """Reads the vocabulary, chat template and end-of-sequence tokens. Raises ConfigError."""
    fields = _read_fields(path)
    kind, split_name = fields.get("model"), fields.get("pre", "default")
    if kind != "gpt2" or split_name not in _SPLITS:
        what = f"type {kind!r}" if kind != "gpt2" else f"pre-tokenizer {split_name!r}"
        raise ConfigError(
            f"{path} has a tokenizer of {what}, which cannot be built from a GGUF file yet; "
            "give --tokenizer a folder with the model's tokenizer.json"
        )
    try:
        return _build(fields, _SPLITS[split_name])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} has a damaged vocabulary ({type(error).__name__}: {error})") from error


def _read_fields(path: Path) -> dict[str, Any]:
    """The file's tokenizer fields, without their common prefixes."""
    try:
        fields = FastGGUFReader(path).fields
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"cannot read {path} as a GGUF file: {error}") from error
    prefixes = ("tokenizer.ggml.", "tokenizer.")
    found = {}
    for name, field in fields.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            found[name.removeprefix(prefix)] = field.contents()
    return found


def _build(fields: dict[str, Any], split: _Split) -> TokenizerFiles:
    tokens: list[str] = fields["tokens"]
    kinds: list[int] = fields.get("token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    core = Core(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=split.whole_words,
        )
    )
    if split.nfc:
        core.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(_added(tokens, kinds, _CONTROL))
    core.add_tokens(_added(tokens, kinds, _USER_DEFINED))
    _surround(core, fields, tokens, split)
    named = {
        f"{name}_token": tokens[fields[key]]
        for name, key in (
            ("bos", "bos_token_id"), ("eos", "eos_token_id"), ("unk", "unknown_token_id"), ("pad", "padding_token_id"),
        )
        if key in fields
    }  # fmt: skip
    eos = frozenset(fields[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in fields)
    return TokenizerFiles(core, fields.get("chat_template"), named, eos)


def _added(tokens: list[str], kinds: list[int], wanted: int) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=wanted == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == wanted
    ]


def _surround(core: Core, fields: dict[str, Any], tokens: list[str], split: _Split) -> None:
    """Sets the tokens that go around every text."""
    around = []
    if fields.get("add_bos_token", split.bos) and "bos_token_id" in fields:
        around.append(fields["bos_token_id"])
    before = len(around)
    if fields.get("add_eos_token", False) and "eos_token_id" in fields:
        around.append(fields["eos_token_id"])
    if around:
        names = [tokens[token_id] for token_id in around]
        core.post_processor = processors.TemplateProcessing(
            single=[*names[:before], "$A", *names[before:]], special_tokens=list(zip(names, around, strict=True))
        )

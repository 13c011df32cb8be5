"""Reads the tokenizer of a model folder as Hugging Face lays it out."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Core

from router.config import ConfigError
from router.tokenizer import TokenizerFiles

# What transformers shows to templates.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_folder(folder: Path) -> TokenizerFiles:
    """Reads tokenizer.json and the files beside it. Raises ConfigError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; give --tokenizer a folder that has one (transformers' save_pretrained "
            "writes it for fast tokenizers)"
        )
    try:
        core = Core.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    named = {**_named_tokens(_read_json(folder / "special_tokens_map.json")), **_named_tokens(config)}
    return TokenizerFiles(core, _chat_template(folder, config), named, _eos_token_ids(folder, core, named))


def read_text(path: Path) -> str:
    """A text file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            named[name] = content
    return named


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the template in tokenizer_config.json; of several, the one named default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _eos_token_ids(folder: Path, core: Core, named: dict[str, str]) -> frozenset[int]:
    """All ids that any of the model's files calls end of sequence."""
    ids: set[int] = set()
    config = _read_json(folder / "config.json")
    for source in (_read_json(folder / "generation_config.json"), config, config.get("text_config")):
        value = source.get("eos_token_id") if isinstance(source, dict) else None
        values = value if isinstance(value, list) else [value]
        ids.update(entry for entry in values if isinstance(entry, int) and not isinstance(entry, bool))
    token_id = core.token_to_id(named["eos_token"]) if "eos_token" in named else None
    if token_id is not None:
        ids.add(token_id)
    return frozenset(ids)

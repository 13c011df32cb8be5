"""Finds the tokenizer among a model's files."""

import dataclasses
from pathlib import Path

from router.config import ConfigError
from router.gguf_vocab import read_gguf
from router.model_folder import read_folder, read_text
from router.tokenizer import Tokenizer


def load_tokenizer(path: Path, chat_template: Path | None = None) -> Tokenizer:
    """Reads the tokenizer of a model folder or a .gguf file. Blocks for seconds.

    Args:
        path: the folder or file.
        chat_template: a Jinja file to use instead of the model's own template.

    Raises:
        ConfigError: something is missing or not supported; the message says what to do.
    """
    if path.is_dir():
        files = read_folder(path)
    elif path.suffix == ".gguf":
        files = read_gguf(path)
    else:
        raise ConfigError(f"{path} is neither a folder with tokenizer.json nor a .gguf file")
    if chat_template is not None:
        files = dataclasses.replace(files, chat_template=read_text(chat_template))
    return Tokenizer(files)

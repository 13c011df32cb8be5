"""What every kind of model file offers to the worker."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from worker.model_config import ModelConfig
from worker.vocabulary import Vocabulary


class CheckpointError(ValueError):
    """A model file is missing, damaged or does not match its configuration; the message names the file."""


class Entry(NamedTuple):
    """What a tensor is, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(Protocol):
    """A model on disk. Tensors carry Hugging Face's names and layouts, whatever the file's own are."""

    @property
    def name(self) -> str:
        """The folder's or file's name."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def entries(self) -> Mapping[str, Entry]:
        """What there is to read, in the order in which it lies on disk. Raises CheckpointError for a damaged file."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU. May be called on several threads. Raises CheckpointError for a damaged file."""

    def vocabulary(self) -> Vocabulary:
        """What text each token stands for. Raises VocabularyError."""


def read_json(path: Path) -> Any:
    """The content of a JSON file of a model folder. Raises CheckpointError when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; a model folder needs it") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error


def manifest_hash(config: ModelConfig, entries: Mapping[str, Entry]) -> str:
    """A hex digest that is equal exactly when configuration, tensor names, shapes and dtypes are."""
    tensors = sorted((name, list(entry.shape), str(entry.dtype)) for name, entry in entries.items())
    content = json.dumps([asdict(config), tensors], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

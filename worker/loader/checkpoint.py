"""What every kind of model file offers to the worker."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from worker.model_config import ModelConfig
from worker.vocabulary import Vocabulary


class CheckpointError(ValueError):
    """A model file is missing, damaged or does not match its configuration; the message names the file."""


class Checkpoint(Protocol):
    """A model on disk. Tensors carry Hugging Face's names and layouts, whatever the file's own are."""

    @property
    def name(self) -> str:
        """The folder's or file's name."""

    @property
    def config(self) -> ModelConfig: ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, without reading it."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, one at a time, on the CPU."""

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


def manifest_hash(config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> str:
    """A hex digest that is equal exactly when configuration, tensor names and shapes are."""
    tensors = sorted((name, list(shape)) for name, shape in shapes.items())
    content = json.dumps([asdict(config), tensors], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

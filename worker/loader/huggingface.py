"""Reads Hugging Face model folders: config.json and safetensors, single or sharded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.loader.checkpoint import CheckpointError, read_json
from worker.loader.hf_config import read_config
from worker.vocabulary import Vocabulary, folder_vocabulary

INDEX = "model.safetensors.index.json"


class HuggingFaceFolder:
    """A folder with config.json and *.safetensors.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModel: the configuration asks for something that is not built.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.config = read_config(folder / "config.json")
        self._folder = folder

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for file in _safetensors_files(self._folder):
            with _open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        return shapes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in _safetensors_files(self._folder):
            with _open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield name, tensors.get_tensor(name)

    def vocabulary(self) -> Vocabulary:
        return folder_vocabulary(self._folder)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is no readable safetensors file: {error}") from error


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        names = sorted(set(read_json(index)["weight_map"].values()))
        files = [folder / name for name in names]
        if missing := [file.name for file in files if not file.exists()]:
            raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
        return files
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise CheckpointError(
        f"{folder} has no *.safetensors file; other weight formats are not read, as they can run code"
    )

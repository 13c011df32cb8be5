"""Reads Hugging Face model folders: config.json and safetensors, single or sharded."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.loader.checkpoint import CheckpointError, Entry, read_json
from worker.loader.hf_config import read_config
from worker.vocabulary import Vocabulary, folder_vocabulary

INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


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
        self._handles: dict[Path, Any] = {}

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The file of each tensor."""
        found: dict[str, Path] = {}
        for file in _safetensors_files(self._folder):
            for name in self._handle(file).keys():  # noqa: SIM118 (not a dict)
                if name in found:
                    raise CheckpointError(f"{self._folder}: {name} is in both {found[name].name} and {file.name}")
                found[name] = file
        return found

    @cached_property
    def entries(self) -> dict[str, Entry]:
        return {name: _entry(self._handle(file), name, file) for name, file in self._files.items()}

    def read(self, name: str) -> torch.Tensor:
        file = self._files[name]
        try:
            tensor: torch.Tensor = self._handle(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: {name} cannot be read: {error}") from error
        return tensor

    def _handle(self, file: Path) -> Any:
        """The open file; its header is checked against its size once."""
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is no readable safetensors file: {error}") from error
        return self._handles[file]

    def vocabulary(self) -> Vocabulary:
        return folder_vocabulary(self._folder)


def _entry(tensors: Any, name: str, file: Path) -> Entry:
    part = tensors.get_slice(name)
    if (kind := part.get_dtype()) not in _DTYPES:
        raise CheckpointError(f"{file}: {name} is of type {kind}, which cannot be read")
    return Entry(tuple(part.get_shape()), _DTYPES[kind])


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

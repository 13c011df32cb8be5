"""Reads model folders and files into this process: configuration and weights."""

from pathlib import Path

from worker.loader.checkpoint import Checkpoint, CheckpointError


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder or a GGUF file. Reads its configuration, not its weights.

    Raises:
        CheckpointError: there is no such model, or it is damaged.
        UnsupportedModel: it needs something that is not built.
    """
    if path.is_dir():
        from worker.loader.huggingface import HuggingFaceFolder

        return HuggingFaceFolder(path)
    if path.is_file() and path.suffix == ".gguf":
        from worker.loader.gguf_file import GGUFFile

        return GGUFFile(path)
    raise CheckpointError(f"{path} is neither a model folder nor a .gguf file on this machine")

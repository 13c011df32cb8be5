"""Fills a model's parameters from a checkpoint, part by part, and refuses whatever does not fit."""

from collections.abc import Callable

import torch
from torch import nn

from worker.loader.checkpoint import Checkpoint, CheckpointError
from worker.models.layers import Linear, VocabularyRows
from worker.models.moe import Experts
from worker.models.sharding import Target

# Buffers that old checkpoints carry and that are computed here, and the output projection of tied embeddings.
_IGNORED = (".rotary_emb.inv_freq", "lm_head.weight")

Progress = Callable[[int, int], None]


def targets(model: nn.Module) -> dict[str, Target]:
    """Where each checkpoint tensor goes, by its name."""
    found: dict[str, Target] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            parent = path.rpartition(".")[0]
            found.update({f"{parent}.{name}": target for name, target in module.targets().items()})
        elif isinstance(module, Experts | VocabularyRows):
            found.update({f"{path}.{name}": target for name, target in module.targets().items()})
        else:
            for name, parameter in module.named_parameters(recurse=False):
                found[f"{path}.{name}"] = Target.whole(parameter.data)
    return found


def load_weights(model: nn.Module, checkpoint: Checkpoint, progress: Progress = lambda done, total: None) -> None:
    """Copies what the model holds of the checkpoint's tensors into it, converting their dtype.

    Args:
        model: built by ``build_model`` from the checkpoint's configuration.
        checkpoint: read one tensor at a time.
        progress: called with tensors done and their number.

    Raises:
        CheckpointError: a tensor is missing, is not the model's, or has another shape.
    """
    shapes = checkpoint.shapes()
    wanted = targets(model)
    if checkpoint.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    _check_fit(checkpoint, shapes, wanted)
    for done, (name, tensor) in enumerate(checkpoint.tensors(), start=1):
        if name in wanted:
            wanted[name].fill(tensor)
        progress(done, len(shapes))


def _check_fit(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], wanted: dict[str, Target]) -> None:
    """Raises CheckpointError unless the file holds exactly what the model needs, before anything is loaded."""
    if missing := sorted(wanted.keys() - shapes.keys()):
        raise CheckpointError(f"{checkpoint.name} lacks {len(missing)} tensors of the model, first {missing[0]}")
    for name, shape in shapes.items():
        if name in wanted:
            if wanted[name].shape != shape:
                raise CheckpointError(
                    f"{checkpoint.name}: {name} has shape {shape}, the model needs {wanted[name].shape}"
                )
        elif not name.endswith(_IGNORED):
            raise CheckpointError(f"{checkpoint.name}: {name} belongs to no part of the model")


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Fills the parameters with small random numbers, for benchmarks: speed does not depend on them.

    A parameter that all ranks hold whole is the same on each of them, whatever the shapes of the others are.
    """
    for index, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            generator = torch.Generator(parameter.device).manual_seed(seed + index)
            parameter.data.normal_(std=0.02, generator=generator)

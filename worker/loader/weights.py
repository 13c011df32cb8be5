"""Fills a model's parameters from a checkpoint, part by part, and refuses whatever does not fit."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import nn

from worker.loader.checkpoint import Checkpoint, CheckpointError, Entry
from worker.models.layers import Linear, VocabularyRows
from worker.models.linear_weights import LinearWeights
from worker.models.moe import Experts
from worker.models.sharding import UNQUANTIZED, Target

logger = logging.getLogger(__name__)

# Buffers that old checkpoints carry and that are computed here, and the output projection of tied embeddings.
_IGNORED = (".rotary_emb.inv_freq", "lm_head.weight")
_KV_CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
# Enough to keep a fast disk busy; more would only hold more tensors at once.
_READERS = 8

Progress = Callable[[int, int], None]


def targets(model: nn.Module) -> dict[str, Target]:
    """Where each checkpoint tensor goes, by its name."""
    found: dict[str, Target] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            parent = path.rpartition(".")[0]
            found.update({f"{parent}.{name}": target for name, target in module.targets().items()})
        elif isinstance(module, LinearWeights):
            continue  # the layer around them has spoken for them
        elif isinstance(module, Experts | VocabularyRows):
            found.update({f"{path}.{name}": target for name, target in module.targets().items()})
        else:
            for name, parameter in module.named_parameters(recurse=False):
                found[f"{path}.{name}"] = Target.whole(parameter.data)
    return found


def load_weights(model: nn.Module, checkpoint: Checkpoint, progress: Progress = lambda done, total: None) -> None:
    """Copies what the model holds of the checkpoint's tensors into it, converting their dtype where they may differ.

    A few threads read at once, each straight to the model's device, and never more than one tensor each.

    Args:
        model: built by ``build_model`` from the checkpoint's configuration.
        checkpoint: where the tensors are.
        progress: called with tensors done and their number.

    Raises:
        CheckpointError: a tensor is missing, cannot be read, is not the model's, or has another shape or dtype. But for
            one that cannot be read, all are found before anything is loaded.
    """
    wanted = targets(model)
    if checkpoint.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    _check_fit(checkpoint, wanted)
    names = [name for name in checkpoint.entries if name in wanted]
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), thread_name_prefix="load") as pool:
        loads = [pool.submit(_load_tensor, checkpoint, name, wanted[name]) for name in names]
        try:
            for done, load in enumerate(as_completed(loads), start=1):
                load.result()
                progress(done, len(names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@torch.inference_mode()  # which is each thread's own, and may be on where the model was built
def _load_tensor(checkpoint: Checkpoint, name: str, target: Target) -> None:
    target.fill(checkpoint.read(name))


def _check_fit(checkpoint: Checkpoint, wanted: dict[str, Target]) -> None:
    """Raises CheckpointError unless the file holds exactly what the model needs, before anything is loaded."""
    if missing := sorted(wanted.keys() - checkpoint.entries.keys()):
        raise CheckpointError(f"{checkpoint.name} lacks {len(missing)} tensors of the model, first {missing[0]}")
    for name, entry in checkpoint.entries.items():
        if name in wanted:
            _check_tensor(checkpoint, name, entry, wanted[name])
        elif not name.endswith(_IGNORED) and not _is_unused_scale(name, wanted):
            raise CheckpointError(f"{checkpoint.name}: {name} belongs to no part of the model")
    if unused := [name for name in checkpoint.entries if _is_unused_scale(name, wanted)]:
        logger.info("%d scales of activations and KV cache are not used, such as %s", len(unused), unused[0])


def _check_tensor(checkpoint: Checkpoint, name: str, entry: Entry, target: Target) -> None:
    if entry.shape not in (target.shape, *target.same_shapes):
        raise CheckpointError(f"{checkpoint.name}: {name} has shape {entry.shape}, the model needs {target.shape}")
    if entry.dtype not in target.dtypes:
        fitting = " or ".join(_dtype_name(dtype) for dtype in target.dtypes)
        raise CheckpointError(f"{checkpoint.name}: {name} is {_dtype_name(entry.dtype)}, the model needs {fitting}")
    if target.value is not None and (held := tuple(checkpoint.read(name).tolist())) != target.value:
        raise CheckpointError(f"{checkpoint.name}: {name} holds {held}, the model needs {target.value}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_unused_scale(name: str, wanted: dict[str, Target]) -> bool:
    """Whether a tensor is a scale of the KV cache, or of activations, which are quantized token by token."""
    if name.endswith(_KV_CACHE_SCALES):
        return True
    return name.endswith(".input_scale") and name.replace(".input_scale", ".weight_scale") in wanted


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Fills the parameters with small random numbers, for benchmarks: speed does not depend on them.

    A parameter that all ranks hold whole is the same on each of them, whatever the shapes of the others are.
    """
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed + index)
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        elif parameter.dtype in UNQUANTIZED:
            parameter.data.normal_(std=0.02, generator=generator)
        elif parameter.is_floating_point():
            parameter.data.copy_(parameter.data.to(torch.bfloat16).normal_(std=0.02, generator=generator))
        else:
            parameter.data.random_(0, 16 if parameter.dtype == torch.uint8 else None, generator=generator)

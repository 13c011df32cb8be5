"""A model with its weights on its device."""

import torch

from worker.config import WorkerConfig
from worker.loader.checkpoint import Checkpoint, manifest_hash
from worker.loader.weights import fill_randomly, load_weights
from worker.models import CausalLM, build_model
from worker.parallel.shards import ALONE, Parallel
from worker.progress import Progress
from worker.setup import quantized_config


def load_model(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel = ALONE,
) -> tuple[CausalLM, str]:
    """A rank's share of the model with its weights on the device, and the hash of the whole model's manifest."""
    model_config = quantized_config(config, checkpoint)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = build_model(model_config, max_model_len, parallel)
    finally:
        torch.set_default_dtype(default)
    if config.load_format == "dummy":
        fill_randomly(model, config.seed)
        return model, manifest_hash(model_config, {})
    if parallel.rank > 0:
        load_weights(model, checkpoint)
    else:
        progress = Progress("loading weights", "tensors")
        load_weights(model, checkpoint, progress.update)
        progress.close()
    return model, manifest_hash(model_config, checkpoint.entries)

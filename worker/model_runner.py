"""Runs planned steps on the device: forward pass, logits, sampling. Decides nothing."""

from collections.abc import Callable

import torch

from kernels.sampling import sample
from worker.engine import LaunchedStep
from worker.kv_cache import KVCache
from worker.models import CausalLM
from worker.scheduler import StepPlan
from worker.step_input import build_step_input


class ModelRunner:
    """The model, its KV cache and the per-row buffers on one device.

    Args:
        model: with its weights.
        cache: the paged keys and values.
        max_num_seqs: rows of the buffers.
        device: where everything lives.
    """

    def __init__(self, model: CausalLM, cache: KVCache, max_num_seqs: int, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        # Sampled ids stay here as the next step's input, so that no step waits for the host to learn them.
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a step: at once on a GPU, to its end on a CPU."""
        step = build_step_input(plan, self.last_tokens, self.cache.block_size)
        hidden = self.model(step.token_ids, step.positions, self.cache, step.attention)
        if not plan.samples:
            return SampledIds(torch.empty(0, dtype=torch.int64), None)
        logits = self.model.logits(hidden.index_select(0, step.sample_tokens))
        ids = sample(logits, step.sampling)
        self.last_tokens.index_copy_(0, step.sample_rows, ids)
        if self.device.type == "cpu":
            return SampledIds(ids, None)
        host_ids = torch.empty(len(ids), dtype=torch.int64, pin_memory=True)
        host_ids.copy_(ids, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return SampledIds(host_ids, copied)

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Nothing is lost between steps that are computed here."""

    def close(self) -> None:
        """Nothing to end."""


class SampledIds:
    """Ids on the host, valid once the copy's event has passed."""

    def __init__(self, ids: torch.Tensor, copied: torch.cuda.Event | None) -> None:
        self._ids = ids
        self._copied = copied

    def sampled(self) -> list[int]:
        """Waits for the copy and returns the ids."""
        if self._copied is not None:
            self._copied.synchronize()
        ids: list[int] = self._ids.tolist()
        return ids

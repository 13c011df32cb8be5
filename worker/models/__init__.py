"""Model families: short files of plain torch modules built from shared layers."""

from typing import Protocol

import torch

from kernels.attention import AttentionBatch
from worker.kv_cache import KVCache
from worker.model_config import ModelConfig, UnsupportedModel
from worker.models.gemma import GemmaForCausalLM
from worker.models.llama import LlamaForCausalLM
from worker.models.moe import MixtralForCausalLM, Qwen3MoeForCausalLM
from worker.models.phi3 import Phi3ForCausalLM
from worker.parallel.shards import ALONE, Parallel


class CausalLM(Protocol):
    """What the runner needs of a model."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """Final hidden states, [tokens, hidden], of ``token_ids`` and ``positions``, both [tokens] int64."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, vocab]; of several ranks, only the leader gets them whole."""


Family = type[LlamaForCausalLM] | type[GemmaForCausalLM]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Gemma2ForCausalLM": GemmaForCausalLM,
    "Gemma3ForCausalLM": GemmaForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def build_model(
    config: ModelConfig, max_position: int, parallel: Parallel = ALONE
) -> LlamaForCausalLM | GemmaForCausalLM:
    """The family's module, its weights not filled yet, on torch's default device and dtype.

    Args:
        config: its ``architecture`` chooses the family.
        max_position: the longest context that will be served, in tokens.
        parallel: which share of the model to hold.

    Raises:
        UnsupportedModel: no family has this architecture.
    """
    family = ARCHITECTURES.get(config.architecture)
    if family is None:
        raise UnsupportedModel(
            f"architecture {config.architecture!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return family(config, max_position, parallel)


__all__ = ["ARCHITECTURES", "CausalLM", "build_model"]

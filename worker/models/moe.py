"""Mixtures of experts in Llama's layers: Mixtral (Jiang et al., 2024) and Qwen 3 MoE.

Each token goes to the few experts that a linear gate scores highest; their outputs are summed by those scores.
"""

import torch
import torch.nn.functional as F
from torch import nn

from kernels.experts import experts_mlp
from worker.model_config import ModelConfig
from worker.models.layers import Linear
from worker.models.llama import LlamaForCausalLM, LlamaLayer


class Experts(nn.Module):
    """All experts' gated feed-forward layers, stacked.

    The checkpoint holds them one by one, under the names given.
    """

    def __init__(self, count: int, hidden_size: int, intermediate_size: int, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names = names
        self.gate_up = nn.Parameter(torch.empty(count, 2 * intermediate_size, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(count, hidden_size, intermediate_size), requires_grad=False)

    def parts(self) -> dict[str, torch.Tensor]:
        """Where each checkpoint tensor goes, by its name below this module."""
        gate, up, down = self.names
        half = self.gate_up.shape[1] // 2
        found = {}
        for expert in range(len(self.gate_up)):
            found[f"{expert}.{gate}.weight"] = self.gate_up.data[expert, :half]
            found[f"{expert}.{up}.weight"] = self.gate_up.data[expert, half:]
            found[f"{expert}.{down}.weight"] = self.down.data[expert]
        return found

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], [tokens, chosen] twice, to [tokens, hidden]."""
        return experts_mlp(x, self.gate_up, self.down, experts, weights)


class SparseMLP(nn.Module):
    """A gate and its experts."""

    names = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.experts is None:
            raise ValueError("the configuration has no experts")
        self.per_token, self.normalize = config.experts.per_token, config.experts.normalize
        self.gate = Linear(config.hidden_size, [("gate", config.experts.count)])
        self.experts = Experts(config.experts.count, config.hidden_size, config.experts.intermediate_size, self.names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        scores = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, experts = scores.topk(self.per_token, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(x, experts, weights.to(x.dtype))


class Qwen3MoeLayer(LlamaLayer):
    """Llama's layer with experts."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.mlp = SparseMLP(config)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """The whole model."""

    layer_class = Qwen3MoeLayer


class MixtralMLP(SparseMLP):
    """The same under Mixtral's tensor names."""

    names = ("w1", "w3", "w2")


class MixtralLayer(LlamaLayer):
    """Llama's layer with experts."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        del self.mlp
        self.block_sparse_moe = MixtralMLP(config)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block_sparse_moe(x)


class MixtralForCausalLM(LlamaForCausalLM):
    """The whole model."""

    layer_class = MixtralLayer

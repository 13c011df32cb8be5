"""Mixtures of experts in Llama's layers: Mixtral (Jiang et al., 2024) and Qwen 3 MoE.

Each token goes to the few experts that a linear gate scores highest; their outputs are summed by those scores.
"""

import torch
import torch.nn.functional as F
from torch import nn

from kernels.experts import experts_mlp
from worker.model_config import ModelConfig
from worker.models.layers import FeedForward, Linear
from worker.models.llama import LlamaForCausalLM, LlamaLayer
from worker.models.sharding import Piece, Target, part
from worker.parallel.shards import Parallel


class Experts(nn.Module):
    """All experts' gated feed-forward layers, stacked, each divided by its inner width.

    The checkpoint holds them one by one, under the names given.
    """

    def __init__(
        self, count: int, hidden_size: int, intermediate_size: int, names: tuple[str, str, str], parallel: Parallel
    ) -> None:
        super().__init__()
        self.names = names
        self.parallel = parallel
        self.intermediate_size = intermediate_size
        self.held = parallel.share(intermediate_size)
        wide = len(self.held)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * wide, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(count, hidden_size, wide), requires_grad=False)

    def targets(self) -> dict[str, Target]:
        """Where each checkpoint tensor goes, by its name below this module."""
        gate, up, down = self.names
        wide, hidden_size = len(self.held), self.down.shape[1]
        inner, outer = (self.intermediate_size, hidden_size), (hidden_size, self.intermediate_size)
        held = slice(self.held.start, self.held.stop)
        found = {}
        for expert in range(len(self.gate_up)):
            both = self.gate_up.data[expert]
            found[f"{expert}.{gate}.weight"] = Target(inner, (Piece(both[:wide], (held,)),))
            found[f"{expert}.{up}.weight"] = Target(inner, (Piece(both[wide:], (held,)),))
            found[f"{expert}.{down}.weight"] = Target(outer, (Piece(self.down.data[expert], (slice(None), held)),))
        return found

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], [tokens, chosen] twice, to [tokens, hidden]."""
        return self.parallel.sum(experts_mlp(x, self.gate_up, self.down, experts, weights))


class SparseMLP(FeedForward):
    """A gate and its experts."""

    names = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        if config.experts is None:
            raise ValueError("the configuration has no experts")
        self.per_token, self.normalize = config.experts.per_token, config.experts.normalize
        count, wide = config.experts.count, config.experts.intermediate_size
        self.gate = Linear(config.hidden_size, [part("gate", (count, range(count)))])
        self.experts = Experts(count, config.hidden_size, wide, self.names, parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        scores = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, experts = scores.topk(self.per_token, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(x, experts, weights.to(x.dtype))


class Qwen3MoeLayer(LlamaLayer):
    """Llama's layer with experts."""

    def __init__(self, config: ModelConfig, layer: int, parallel: Parallel) -> None:
        super().__init__(config, layer, parallel)
        self.mlp = SparseMLP(config, parallel)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """The whole model."""

    layer_class = Qwen3MoeLayer


class MixtralMLP(SparseMLP):
    """The same under Mixtral's tensor names."""

    names = ("w1", "w3", "w2")


class MixtralLayer(LlamaLayer):
    """Llama's layer with experts."""

    def __init__(self, config: ModelConfig, layer: int, parallel: Parallel) -> None:
        super().__init__(config, layer, parallel)
        del self.mlp
        self.block_sparse_moe = MixtralMLP(config, parallel)

    @property
    def feed_forward(self) -> FeedForward:
        return self.block_sparse_moe


class MixtralForCausalLM(LlamaForCausalLM):
    """The whole model."""

    layer_class = MixtralLayer

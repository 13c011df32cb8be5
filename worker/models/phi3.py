"""Phi-3 and Phi-4-mini (Abdin et al., 2024): Llama's layers, their projections fused in the checkpoint already."""

from worker.model_config import ModelConfig
from worker.models.layers import Attention, GatedMLP
from worker.models.llama import LlamaForCausalLM, LlamaLayer
from worker.parallel.shards import Parallel


class Phi3Layer(LlamaLayer):
    """Llama's layer over fused tensors."""

    def __init__(self, config: ModelConfig, layer: int, parallel: Parallel) -> None:
        super().__init__(config, layer, parallel)
        self.self_attn = Attention(config, layer, parallel, fused=True)
        self.mlp = GatedMLP(config, layer, parallel, fused=True)


class Phi3ForCausalLM(LlamaForCausalLM):
    """The whole model."""

    layer_class = Phi3Layer

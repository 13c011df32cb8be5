"""Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024), and the many models that changed only their numbers:
Mistral (Jiang et al., 2023), Qwen 2 and 2.5 (biases on query, key and value), Qwen 3 (normalised heads), SmolLM.

Module names follow the checkpoint's tensor names.
"""

import torch
from torch import nn

from kernels.attention import AttentionBatch
from worker.kv_cache import KVCache
from worker.model_config import ModelConfig
from worker.models.layers import Angles, Attention, Embedding, FeedForward, GatedMLP, OutputHead, RMSNorm
from worker.models.rope import RotaryAngles
from worker.parallel.shards import Parallel


class LlamaLayer(nn.Module):
    """Attention, then feed-forward, each after a norm of the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, parallel: Parallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, parallel)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: FeedForward = GatedMLP(config, layer, parallel)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles, cache: KVCache, batch: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual) in and out, each [tokens, hidden]; their sum is the stream."""
        normed, residual = self.input_layernorm.add_before(self.self_attn, x, residual)
        x = self.self_attn(normed, angles, cache, batch)
        normed, residual = self.post_attention_layernorm.add_before(self.feed_forward, x, residual)
        return self.feed_forward(normed), residual

    @property
    def feed_forward(self) -> FeedForward:
        """The second half."""
        return self.mlp


class LlamaModel(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig, max_position: int, layer: type[LlamaLayer], parallel: Parallel) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(layer(config, index, parallel) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.angles = RotaryAngles(config.rope, config.head_dim, max_position)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """[tokens] twice to [tokens, hidden]."""
        x, residual = self.embed_tokens(token_ids), None
        angles = self.angles(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, angles, cache, batch)
        return self.norm.add(x, residual)[0]


class LlamaForCausalLM(nn.Module):
    """The whole model.

    Args:
        config: the model's sizes.
        max_position: positions to prepare rotary angles for.
        parallel: which share of it to hold.
    """

    layer_class: type[LlamaLayer] = LlamaLayer

    def __init__(self, config: ModelConfig, max_position: int, parallel: Parallel) -> None:
        super().__init__()
        self.model: nn.Module = LlamaModel(config, max_position, self.layer_class, parallel)
        self.lm_head = OutputHead(config.vocab_size, config.hidden_size, parallel)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """Final hidden states, [tokens, hidden], of ``token_ids`` and ``positions``, both [tokens] int64."""
        return self.model(token_ids, positions, cache, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, vocab], whole on the leader only."""
        return self.lm_head(hidden)

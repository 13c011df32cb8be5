"""Gemma 2 and 3, text only (Gemma Team, 2024 and 2025).

Unlike Llama's: norms that multiply by one plus their weight, around both halves of a layer; scaled embeddings; a window
in most layers, with rotary angles of its own in Gemma 3; soft caps in Gemma 2, normalised heads in Gemma 3.
"""

import torch
from torch import nn

from kernels.attention import AttentionBatch
from worker.kv_cache import KVCache
from worker.model_config import ModelConfig
from worker.models.layers import Angles, Attention, Embedding, GatedMLP, OutputHead, RMSNorm
from worker.models.rope import RotaryAngles
from worker.parallel.shards import Parallel


class GemmaLayer(nn.Module):
    """Attention, then feed-forward, each between two norms."""

    def __init__(self, config: ModelConfig, layer: int, parallel: Parallel) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_local = config.window(layer) is not None
        self.input_layernorm = RMSNorm(size, eps, offset=1.0)
        self.self_attn = Attention(config, layer, parallel, norm_offset=1.0)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=1.0)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, offset=1.0)
        self.mlp = GatedMLP(config, layer, parallel)
        self.post_feedforward_layernorm = RMSNorm(size, eps, offset=1.0)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: Angles, cache: KVCache, batch: AttentionBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual) in and out, each [tokens, hidden]; their sum is the stream."""
        normed, residual = self.input_layernorm.add_before(self.self_attn, x, residual)
        x = self.post_attention_layernorm(self.self_attn(normed, angles, cache, batch))
        normed, residual = self.pre_feedforward_layernorm.add_before(self.mlp, x, residual)
        return self.post_feedforward_layernorm(self.mlp(normed)), residual


class GemmaModel(nn.Module):
    """Scaled embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig, max_position: int, parallel: Parallel) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, parallel)
        # Rounded to the model's dtype, as it was in training.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=torch.get_default_dtype()).item()
        self.layers = nn.ModuleList(GemmaLayer(config, layer, parallel) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        self.angles = RotaryAngles(config.rope, config.head_dim, max_position)
        self.local_angles = (
            RotaryAngles(config.local_rope, config.head_dim, max_position) if config.local_rope else self.angles
        )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """[tokens] twice to [tokens, hidden]."""
        x, residual = self.embed_tokens(token_ids) * self.embedding_scale, None
        angles, local_angles = self.angles(positions), self.local_angles(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, local_angles if layer.is_local else angles, cache, batch)
        return self.norm.add(x, residual)[0]


class GemmaForCausalLM(nn.Module):
    """The whole model.

    Args:
        config: the model's sizes.
        max_position: positions to prepare rotary angles for.
        parallel: which share of it to hold.
    """

    def __init__(self, config: ModelConfig, max_position: int, parallel: Parallel) -> None:
        super().__init__()
        self.model = GemmaModel(config, max_position, parallel)
        self.lm_head = OutputHead(config.vocab_size, config.hidden_size, parallel)
        self.softcap = config.logit_softcap
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """Final hidden states, [tokens, hidden], of ``token_ids`` and ``positions``, both [tokens] int64."""
        return self.model(token_ids, positions, cache, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, vocab], whole on the leader only."""
        logits = self.lm_head(hidden)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

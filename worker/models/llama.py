"""Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024), and models of the same architecture such as SmolLM2.

Module names follow the checkpoint's tensor names.
"""

import torch
from torch import nn

from kernels.activation import silu_mul
from kernels.attention import AttentionBatch, paged_attention
from kernels.kv_cache import write_kv
from kernels.rotary import rotate
from worker.kv_cache import KVCache
from worker.model_config import ModelConfig
from worker.models.layers import Embedding, Linear, RMSNorm, RotaryAngles


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)],
            bias=config.attention_bias,
        )
        self.o_proj = Linear(queries, [("o_proj", config.hidden_size)], bias=config.attention_bias)

    def forward(
        self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        query, key, value = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        query, key = rotate(query, *angles), rotate(key, *angles)
        key_cache, value_cache = cache.layer(self.layer)
        write_kv(key, value, key_cache, value_cache, batch.slot_mapping)
        return self.o_proj(paged_attention(query, key_cache, value_cache, batch, self.scale).flatten(1))


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, wide = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(size, [("gate_proj", wide), ("up_proj", wide)], bias=config.mlp_bias)
        self.down_proj = Linear(wide, [("down_proj", size)], bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x)))


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        batch: AttentionBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, angles, cache, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.angles = RotaryAngles(config, max_position)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        x, residual = self.embed_tokens(token_ids), None
        angles = self.angles(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, angles, cache, batch)
        return self.norm(x, residual)[0]


class LlamaForCausalLM(nn.Module):
    """
    Args:
        config: the model's sizes.
        max_position: positions to prepare rotary angles for.
    """

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        self.model = LlamaModel(config, max_position)
        self.lm_head = Linear(config.hidden_size, [("lm_head", config.vocab_size)])
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """Final hidden states, [tokens, hidden], of ``token_ids`` and ``positions``, both [tokens] int64."""
        return self.model(token_ids, positions, cache, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, vocab]."""
        return self.lm_head(hidden)

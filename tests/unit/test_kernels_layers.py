"""Norm, rotary embedding and activation against transformers' own modules."""

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from kernels.activation import gelu_tanh_mul, silu_mul
from kernels.norm import add_rms_norm, rms_norm
from kernels.rotary import rotate
from worker.model_config import RopeConfig
from worker.models.rope import RotaryAngles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x, residual = torch.randn(2, 5, 64, dtype=dtype)
    assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))
    normed, total = add_rms_norm(x, residual, norm.weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))
    offset_norm = Gemma3RMSNorm(64, eps=1e-5).to(dtype)
    offset_norm.weight.data.normal_()
    assert torch.equal(rms_norm(x, offset_norm.weight, 1e-5, offset=1.0), offset_norm(x))


def test_gated_activations():
    torch.manual_seed(0)
    gate, up = torch.randn(2, 5, 32)
    both = torch.cat((gate, up), dim=-1)
    assert torch.equal(silu_mul(both), ACT2FN["silu"](gate) * up)
    assert torch.equal(gelu_tanh_mul(both), ACT2FN["gelu_pytorch_tanh"](gate) * up)


ROPES = {
    "default": (RopeConfig(1e4), {"rope_type": "default"}),
    "linear": (RopeConfig(1e4, "linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RopeConfig(1e4, "llama3", 8.0, 64, 1.0, 4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (
        RopeConfig(1e4, "yarn", 8.0, 64),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    ),
    "yarn-mscale": (
        RopeConfig(1e4, "yarn", 8.0, 64, mscale=0.7, mscale_all_dim=1.0, beta_fast=16, beta_slow=2),
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "beta_fast": 16,
            "beta_slow": 2,
        },
    ),
    "dynamic": (RopeConfig(1e4, "dynamic", 3.0, 256), {"rope_type": "dynamic", "factor": 3.0}),
    "longrope": (
        RopeConfig(1e4, "longrope", 8.0, 64, short_factors=(1.0,) * 8, long_factors=tuple(1 + i / 4 for i in range(8))),
        {
            "rope_type": "longrope",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "long_factor": [1 + i / 4 for i in range(8)],
        },
    ),
    "partial": (RopeConfig(1e4, partial=0.5), {"rope_type": "default", "partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_embedding(kind):
    """Angles against transformers' own, at the longest context, for which kinds that look at the length are set."""
    torch.manual_seed(0)
    ours, theirs = ROPES[kind]
    heads, dim = 3, 16
    config_class, rotary_class = LlamaConfig, LlamaRotaryEmbedding
    if kind in ("longrope", "partial"):
        config_class, rotary_class = Phi3Config, Phi3RotaryEmbedding
    config = config_class(
        hidden_size=heads * dim,
        num_attention_heads=heads,
        max_position_embeddings=256 if kind == "dynamic" else 512,
        original_max_position_embeddings=64,
        rope_parameters={"rope_theta": 10_000.0, **theirs},
    )
    positions = torch.tensor([0, 1, 5, 63, 64, 511])
    x = torch.randn(len(positions), heads, dim)
    cos, sin = rotary_class(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    angles = RotaryAngles(ours, dim, 512)(positions)
    torch.testing.assert_close(rotate(x, *angles), expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)

"""Norm, rotary embedding and activation against transformers' own modules."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels.activation import silu_mul
from kernels.norm import add_rms_norm, rms_norm
from kernels.rotary import rotate
from worker.model_config import ModelConfig, RopeScaling
from worker.models.layers import RotaryAngles


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


def test_silu_mul():
    torch.manual_seed(0)
    gate, up = torch.randn(2, 5, 32)
    assert torch.equal(silu_mul(torch.cat((gate, up), dim=-1)), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("scaling", "theirs"),
    [
        (None, {"rope_type": "default"}),
        (RopeScaling("linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_rotary_embedding(scaling, theirs):
    torch.manual_seed(0)
    heads, dim = 3, 16
    config = LlamaConfig(
        hidden_size=heads * dim,
        num_attention_heads=heads,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10_000.0, **theirs},
    )
    positions = torch.tensor([0, 1, 5, 63, 64, 511])
    x = torch.randn(len(positions), heads, dim)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    ours = ModelConfig("", 1, heads * dim, 1, 1, heads, heads, dim, 512, 1e-5, 10_000.0, scaling)
    angles = RotaryAngles(ours, 512)(positions)
    torch.testing.assert_close(rotate(x, *angles), expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)

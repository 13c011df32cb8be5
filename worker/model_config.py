"""What a model is: the numbers that its layers are built from, whatever file they were read from."""

from dataclasses import dataclass


class UnsupportedModel(ValueError):
    """The model needs something that is not built; the message names it and what is supported."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for longer contexts.

    ``kind`` is "linear" (positions divided by ``factor``) or "llama3" (low frequencies divided by ``factor``, high ones
    kept, those between blended, as published with Llama 3.1).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Sizes are in elements; ``max_position`` in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"

"""What a model is: the numbers that its layers are built from, whatever file they were read from."""

from dataclasses import dataclass

from worker.quantization import Quantization


class UnsupportedModel(ValueError):
    """The model needs something that is not built; the message names it and what is supported."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, and how its frequencies are stretched for longer contexts (see models/rope.py).

    Attributes:
        theta: base of the frequencies.
        kind: default, linear, dynamic, llama3, yarn or longrope.
        factor: how much longer the context is than the one trained first.
        original_max_position: that first context, in tokens.
        low_freq_factor, high_freq_factor: llama3: where frequencies begin and end to be kept.
        beta_fast, beta_slow: yarn: the same, in rotations over the first context.
        attention_factor: yarn and longrope: multiplies cosines and sines; None computes it from ``factor``.
        mscale, mscale_all_dim: yarn: two scales whose ratio is the attention factor; 0 when absent.
        short_factors, long_factors: longrope: divisors of each frequency within and beyond the first context.
        partial: share of each head's dimensions that are rotated.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    partial: float = 1.0


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward layer.

    Attributes:
        count: experts a layer.
        per_token: experts that each token is sent to.
        intermediate_size: width of one expert.
        normalize: whether the chosen experts' weights are scaled to sum to 1.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool


@dataclass(frozen=True)
class ModelConfig:
    """Sizes are in elements, positions and windows in tokens.

    Attributes:
        sliding_windows: for each layer the tokens that a query sees, itself included, or None for all; empty: no layer
            has a window.
        local_rope: replaces ``rope`` in layers with a window.
        qk_norm: query and key heads are normalised before they are rotated.
        query_scale: multiplies attention scores; None is 1 / sqrt(head_dim).
        attention_softcap, logit_softcap: s * tanh(x / s) of scores and of logits; None is off.
        activation: of the gate: silu or gelu_tanh.
        experts: replaces the feed-forward layers.
        quantization: of the linear layers' weights; None: they have the model's dtype.
    """

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
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    qk_norm: bool = False
    query_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    activation: str = "silu"
    experts: ExpertsConfig | None = None
    quantization: Quantization | None = None

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees, itself included, or None for all."""
        return self.sliding_windows[layer] if self.sliding_windows else None

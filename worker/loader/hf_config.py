"""Reads Hugging Face's config.json, of every supported architecture, into a ModelConfig."""

from pathlib import Path
from typing import Any

from worker.loader.checkpoint import CheckpointError, read_json
from worker.loader.quantization_config import read_quantization
from worker.model_config import ExpertsConfig, ModelConfig, RopeConfig, UnsupportedModel

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_KINDS = {"su": "longrope"}  # the first name of longrope
_GEMMA = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")


def read_config(path: Path) -> ModelConfig:
    """Reads a config.json.

    Raises:
        CheckpointError: the file is missing, damaged or lacks a key.
        UnsupportedModel: it asks for something that is not built.
    """
    raw = read_json(path)
    _check_values(raw, path)
    try:
        return _model_config(raw, path)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from error
    except (CheckpointError, UnsupportedModel):
        raise
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: a value is not what it should be: {error}") from error


_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "sliding_window", "moe_intermediate_size", "num_experts_per_tok",
)  # fmt: skip
_MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window")


def _check_values(raw: object, path: Path) -> None:
    """Raises CheckpointError when a number that sizes the model is none."""
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}; it must hold an object")
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: architectures is {names!r}; it must be a list of strings")
    for key in _COUNTS:
        value = raw.get(key)
        if key not in raw or (value is None and key in _MAY_BE_NULL):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{path}: {key} is {value!r}; it must be a positive whole number")
    eps = raw.get("rms_norm_eps", 1.0)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 <= eps <= 1:
        raise CheckpointError(f"{path}: rms_norm_eps is {eps!r}; it must be a number from 0 to 1")


def _model_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    architecture = (raw.get("architectures") or ["(none)"])[0]
    experts, quantization = _experts(raw, architecture, path), read_quantization(raw, path)
    if experts and quantization:
        raise UnsupportedModel(
            f"{path}: {architecture} with quantized weights ({quantization.method}) is not supported"
        )
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{path}: activation {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    is_gemma = architecture in _GEMMA
    bias = raw.get("attention_bias", False)
    rope, local_rope = _ropes(raw, architecture)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position=raw["max_position_embeddings"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope=rope,
        local_rope=local_rope,
        tie_word_embeddings=raw.get("tie_word_embeddings", is_gemma),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        o_bias=bias,
        mlp_bias=raw.get("mlp_bias", False),
        sliding_windows=_windows(raw, architecture),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM"),
        query_scale=raw.get("query_pre_attn_scalar", 256) ** -0.5 if is_gemma else None,
        attention_softcap=raw.get("attn_logit_softcapping") if is_gemma else None,
        logit_softcap=raw.get("final_logit_softcapping") if is_gemma else None,
        activation=_ACTIVATIONS[activation],
        experts=experts,
        quantization=quantization,
    )


def _windows(raw: dict[str, Any], architecture: str) -> tuple[int | None, ...]:
    """The window of each layer; empty when no layer has one."""
    window = raw.get("sliding_window")
    layers = raw["num_hidden_layers"]
    if architecture.startswith("Qwen") and not raw.get("use_sliding_window", False):
        window = None
    if window is None:
        return ()
    if kinds := raw.get("layer_types"):
        local = [kind == "sliding_attention" for kind in kinds]
    elif architecture == "Gemma2ForCausalLM":
        local = [layer % 2 == 0 for layer in range(layers)]
    elif architecture == "Gemma3ForCausalLM":
        pattern = raw.get("sliding_window_pattern", 6)
        local = [(layer + 1) % pattern != 0 for layer in range(layers)]
    elif architecture.startswith("Qwen"):
        local = [layer >= raw.get("max_window_layers", 0) for layer in range(layers)]
    else:
        local = [True] * layers
    return tuple(window if is_local else None for is_local in local)


def _ropes(raw: dict[str, Any], architecture: str) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of all layers, and that of layers with a window where it differs.

    transformers 5 keeps base and scaling in ``rope_parameters``, earlier releases apart.
    """
    parameters = raw.get("rope_parameters") or {}
    if "full_attention" in parameters:
        return _rope(raw, parameters["full_attention"]), _rope(raw, parameters["sliding_attention"])
    rope = _rope(raw, parameters or raw.get("rope_scaling") or {})
    if architecture == "Gemma3ForCausalLM":
        return rope, RopeConfig(theta=float(raw.get("rope_local_base_freq", 10_000.0)))
    return rope, None


def _rope(raw: dict[str, Any], scaling: dict[str, Any]) -> RopeConfig:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = _ROPE_KINDS.get(kind, kind)
    longest = raw["max_position_embeddings"]
    original = scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or longest
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        kind=kind,
        factor=float(scaling.get("factor") or longest / original),
        original_max_position=int(original),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        short_factors=tuple(scaling.get("short_factor") or ()),
        long_factors=tuple(scaling.get("long_factor") or ()),
        partial=float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0),
    )


def _experts(raw: dict[str, Any], architecture: str, path: Path) -> ExpertsConfig | None:
    if architecture == "MixtralForCausalLM":
        return ExpertsConfig(
            raw["num_local_experts"], raw["num_experts_per_tok"], raw["intermediate_size"], normalize=True
        )
    if architecture == "Qwen3MoeForCausalLM":
        if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
            raise UnsupportedModel(f"{path}: layers without experts beside layers with experts are not supported")
        count = raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]
        return ExpertsConfig(count, raw["num_experts_per_tok"], raw["moe_intermediate_size"], raw["norm_topk_prob"])
    return None

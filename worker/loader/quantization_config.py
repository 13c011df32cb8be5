"""Reads ``quantization_config`` of a config.json, in the spellings of the tools that quantize models."""

import re
from pathlib import Path
from typing import Any

from worker.model_config import UnsupportedModel
from worker.quantization import W4A16, Fp8, Modules, Quantization

SUPPORTED = (
    "fp8 with one scale a weight tensor; awq with 4 bits; compressed-tensors float-quantized (fp8 with one scale a "
    "tensor or channel) and pack-quantized (4 bits, without activation order)"
)


def read_quantization(raw: dict[str, Any], path: Path) -> Quantization | None:
    """What a config.json says of its weights; None when they are not quantized.

    Args:
        raw: the file's content.
        path: of the file, for messages.

    Raises:
        UnsupportedModel: they are quantized in a way that is not built; the message names it.
        KeyError: a key is missing.
    """
    settings = raw.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method", "unknown")
    reader = {"fp8": _fp8, "awq": _awq, "compressed-tensors": _compressed_tensors}.get(method)
    if reader is None:
        raise _Refusal(path, f"by {method}")
    return reader(settings, path)


class _Refusal(UnsupportedModel):
    def __init__(self, path: Path, how: str) -> None:
        super().__init__(f"{path} says that the weights are quantized {how}; supported: {SUPPORTED}")


def _fp8(settings: dict[str, Any], path: Path) -> Quantization:
    if block := settings.get("weight_block_size"):
        raise _Refusal(path, f"by fp8 with a scale for each block of {' x '.join(map(str, block))}")
    ignored = settings.get("modules_to_not_convert") or settings.get("ignored_layers")
    return Fp8("tensor", _modules(path, ignored=ignored))


def _awq(settings: dict[str, Any], path: Path) -> Quantization:
    if settings["bits"] != 4:
        raise _Refusal(path, f"by awq with {settings['bits']} bits")
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise _Refusal(path, f"by awq in the {version} layout")
    if not settings.get("zero_point", True):
        raise _Refusal(path, "by awq without zero points")
    size = settings["group_size"]
    return W4A16("awq", _group_size(size, path), True, _modules(path, ignored=settings.get("modules_to_not_convert")))


def _compressed_tensors(settings: dict[str, Any], path: Path) -> Quantization:
    groups = list(settings["config_groups"].values())
    if len(groups) != 1:
        raise _Refusal(path, f"by compressed-tensors with {len(groups)} groups of layers; only 1 can be")
    (group,) = groups
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _Refusal(path, "by compressed-tensors with sparse weights")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise _Refusal(path, "by compressed-tensors with transforms")
    form = group.get("format") or settings["format"]
    weights, inputs = group["weights"], group.get("input_activations")
    described = f"by compressed-tensors {form} with {weights['num_bits']}-bit {weights['type']} weights"
    if group.get("output_activations"):
        raise _Refusal(path, f"{described} and quantized outputs")
    modules = _modules(path, group["targets"], settings.get("ignore"))
    kind, strategy = (form, weights["num_bits"], weights["type"]), weights["strategy"]
    if kind == ("float-quantized", 8, "float"):
        if strategy not in ("tensor", "channel"):
            raise _Refusal(path, f"{described}, scaled by {strategy}")
        if inputs is None or (inputs["num_bits"], inputs["type"]) != (8, "float"):
            raise _Refusal(path, f"{described} and activations that are not fp8")
        if inputs["strategy"] not in ("tensor", "token"):
            raise _Refusal(path, f"{described} and activations scaled by {inputs['strategy']}")
        return Fp8(strategy, modules)
    if kind == ("pack-quantized", 4, "int"):
        if strategy not in ("group", "channel"):
            raise _Refusal(path, f"{described}, scaled by {strategy}")
        if inputs is not None:
            raise _Refusal(path, f"{described} and quantized activations")
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise _Refusal(path, f"{described}, in activation order ({weights['actorder']})")
        size = _group_size(weights["group_size"], path) if strategy == "group" else None
        return W4A16("compressed-tensors", size, not weights["symmetric"], modules)
    raise _Refusal(path, described)


def _group_size(size: int, path: Path) -> int | None:
    if size != -1 and (size < 16 or size % 16):
        raise _Refusal(path, f"in groups of {size} inputs, not of a multiple of 16")
    return None if size == -1 else size


def _modules(path: Path, targets: list[str] | None = None, ignored: list[str] | None = None) -> Modules:
    for pattern in (*(targets or ()), *(ignored or ())):
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise UnsupportedModel(f"{path}: quantization_config names layers by {pattern!r}: {error}") from error
    return Modules(tuple(targets or ("Linear",)), tuple(ignored or ()))

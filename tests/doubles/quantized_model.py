"""Quantizes models made by ``tiny_model`` in the formats that tools write, with packers of its own.

Each ``write_*`` rewrites a folder's weights and config.json, and puts the rounded weights into the model, which then
computes what a folder with 4-bit weights says. ``compute_in_fp8`` makes a model compute in float64 as FP8 is meant.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns is in the word's i-th four bits

Tensors = dict[str, torch.Tensor]


def linears(model: nn.Module, skip: Iterable[str] = ()) -> dict[str, nn.Linear]:
    """The model's linear layers but for the output projection and those of which ``skip`` is a part of the name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head" and not any(part in name for part in skip)
    }


def rewrite(folder: Path, model: transformers.PreTrainedModel, made: dict[str, Tensors], quantization: dict) -> None:
    """Saves the model with the tensors of the named layers in place of their weights."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for layer, parts in made.items():
        del tensors[f"{layer}.weight"]
        tensors.update({f"{layer}.{name}": tensor.contiguous() for name, tensor in parts.items()})
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def change_quantization(folder: Path, change: Callable[[dict], object]) -> None:
    """Applies ``change`` to the ``quantization_config`` of a folder's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def pack_rows(codes: torch.Tensor, places: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[rows, n] integers from 0 to 15 to [rows, ceil(n / 8)] int32, one number at a time."""
    words = []
    for row in codes.tolist():
        row += [0] * (-len(row) % 8)
        packed = [sum(row[at + place] << 4 * i for i, place in enumerate(places)) for at in range(0, len(row), 8)]
        words.append([word - (1 << 32) if word >= 1 << 31 else word for word in packed])
    return torch.tensor(words, dtype=torch.int32)


def four_bits(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [out, in], scales [out, groups], zeros [out, groups]); scales are exact in float16 and bfloat16."""
    grouped = weight.view(weight.shape[0], -1, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    if symmetric:
        scales = (torch.maximum(-low, high) / 7.5).bfloat16().float()
        zeros = torch.full_like(scales, 8)
    else:
        scales = ((high - low) / 15).bfloat16().float()
        zeros = (-low / scales).round().clamp(0, 15)
    codes = (grouped / scales + zeros).round().clamp(0, 15)
    return codes.view_as(weight).int(), scales[..., 0], zeros[..., 0].int()


def _round_weights(layer: nn.Linear, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, zeros = four_bits(layer.weight.data, group, symmetric)
    layer.weight.data = (codes - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)
    return codes, scales, zeros


def write_awq(folder: Path, model: transformers.PreTrainedModel, group: int = 32, skip: tuple[str, ...] = ()) -> None:
    """As AutoAWQ's "gemm" version."""
    made = {}
    for name, layer in linears(model, skip).items():
        codes, scales, zeros = _round_weights(layer, group, symmetric=False)
        made[name] = {
            "qweight": pack_rows(codes.T, AWQ_PLACES),
            "qzeros": pack_rows(zeros.T, AWQ_PLACES),
            "scales": scales.T.to(torch.bfloat16),
        }
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    rewrite(folder, model, made, {**settings, "modules_to_not_convert": list(skip) or None})


def write_packed(
    folder: Path,
    model: transformers.PreTrainedModel,
    group: int | None = 32,
    symmetric: bool = True,
    skip: tuple[str, ...] = (),
) -> None:
    """As compressed-tensors' "pack-quantized"; without a group size, each output has one scale."""
    made = {}
    for name, layer in linears(model, skip).items():
        codes, scales, zeros = _round_weights(layer, group or layer.in_features, symmetric)
        made[name] = {
            "weight_packed": pack_rows(codes),
            "weight_scale": scales.to(torch.bfloat16),
            "weight_shape": torch.tensor(layer.weight.shape),
        }
        if not symmetric:
            made[name]["weight_zero_point"] = pack_rows(zeros.T).T
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "group_size": group, "actorder": None,
               "strategy": "group" if group else "channel", "dynamic": False}  # fmt: skip
    rewrite(folder, model, made, _compressed_tensors("pack-quantized", weights, None, skip))


def write_fp8(
    folder: Path,
    model: transformers.PreTrainedModel,
    strategy: str = "tensor",
    tool: str = "compressed-tensors",
    static: bool = False,
    skip: tuple[str, ...] = (),
) -> None:
    """As compressed-tensors' "float-quantized", or as ``tool="fp8"``; the model gets the rounded weights."""
    made = {}
    for name, layer in linears(model, skip).items():
        weight = layer.weight.data
        largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max().view(1)
        scale = largest / 448
        values = round_to_e4m3(weight / scale)
        layer.weight.data = values * scale
        made[name] = {"weight": values.to(torch.float8_e4m3fn), "weight_scale": scale}
        if tool == "fp8":
            made[name]["weight_scale"] = scale.view(())
        if static:
            made[name]["input_scale"] = torch.tensor([0.01])
    if tool == "fp8":
        scheme = "static" if static else "dynamic"
        settings = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head", *skip]}
    else:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
        inputs = {"num_bits": 8, "type": "float", "strategy": "tensor" if static else "token", "dynamic": not static}
        settings = _compressed_tensors("float-quantized", weights, inputs, skip)
    rewrite(folder, model, made, settings)


def _compressed_tensors(form: str, weights: dict, inputs: dict | None, skip: tuple[str, ...]) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(f"re:.*{part}.*" for part in skip)],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """To the nearest of 8-bit numbers with three bits of mantissa and exponents from -6 to 8, ties to even."""
    x = x.clamp(-448, 448)
    exponent = (torch.frexp(x).exponent - 1).clamp(min=-6)
    step = torch.ldexp(torch.ones_like(x), exponent - 3)
    return (x / step).round() * step


def fp8_product(x: torch.Tensor, weight: torch.Tensor, shares: int = 1) -> torch.Tensor:
    """``x @ weight.T`` with each token of each of several shares of the inputs rounded to e4m3 by itself.

    Args:
        x: [..., in] float64.
        weight: [out, in] float64: what values and scales multiply to.
        shares: in how many equal parts the inputs are.
    """
    total = torch.zeros((), dtype=x.dtype)
    for part, columns in zip(x.chunk(shares, -1), weight.chunk(shares, -1), strict=True):
        scale = (part.abs().amax(-1, keepdim=True).float() / 448).double().clamp(min=1e-38)
        total = total + round_to_e4m3(part / scale) * scale @ columns.T
    return total


class _Fp8Linear(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = fp8_product(x.double(), self.weight)
        return y if self.bias is None else y + self.bias


def compute_in_fp8(model: transformers.PreTrainedModel, skip: tuple[str, ...] = ()) -> transformers.PreTrainedModel:
    """Replaces the linear layers, whose weights are rounded already, and makes the model float64."""
    for name, layer in linears(model, skip).items():
        model.set_submodule(name, _Fp8Linear(layer))
    return model.double()


def round_per_channel(model: transformers.PreTrainedModel) -> None:
    """Rounds every weight as ``--quantization fp8`` is meant to."""
    for layer in linears(model).values():
        scale = layer.weight.data.abs().amax(1, keepdim=True) / 448
        layer.weight.data = round_to_e4m3(layer.weight.data / scale) * scale

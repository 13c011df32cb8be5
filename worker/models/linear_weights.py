"""The weights of a linear layer, in each form that they may have: parameters, product, and where tensors go.

A form is chosen once, when the layer is built. The layer around it knows of biases and of sums over ranks; the form
knows its parameters and its operation in ``kernels``.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from kernels.activation import GATED
from kernels.awq_linear import pack_weight, packed_width, w4a16_linear
from kernels.fp8_linear import fp8_gated_product, fp8_product
from kernels.fp8_quantize import Quantized, quantize_per_token
from kernels.linear import gated_linear, linear
from worker.model_config import ModelConfig, UnsupportedModel
from worker.models.packing import AWQ_ORDER, CONSECUTIVE, unpack
from worker.models.sharding import Part, Piece, Target
from worker.quantization import W4A16, Fp8, Quantization

_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Cut:
    """What a rank holds of a fused projection.

    Attributes:
        in_features: width of the whole input.
        inputs: those held.
        parts: the fused tensors, and the outputs held of each.
    """

    in_features: int
    inputs: range
    parts: tuple[Part, ...]

    @property
    def out_held(self) -> int:
        """Outputs held of all parts."""
        return sum(len(rows) for part in self.parts for rows in part.held)

    def rows(self) -> Iterator[tuple[Part, list[tuple[slice, slice]]]]:
        """For each part, its held rows: where they are in a parameter, and where in the checkpoint's tensor."""
        start = 0
        for part in self.parts:
            places = []
            for rows in part.held:
                places.append((slice(start, start + len(rows)), slice(rows.start, rows.stop)))
                start += len(rows)
            yield part, places


Activations = torch.Tensor | Quantized


class LinearWeights(nn.Module):
    """One of the forms below. Called with [tokens, inputs held] and a bias or None; returns [tokens, outputs held].

    Attributes:
        takes_quantized: whether the input may be ``Quantized``, and is best made so by the operation before.
    """

    takes_quantized = False

    def gated(self, x: Activations, bias: torch.Tensor | None, activation: str, quantize: bool) -> Activations:
        """``act(gate) * up`` of the two halves of the outputs, [tokens, outputs held / 2].

        ``quantize``: what comes next takes ``Quantized``, and the result may be that.
        """
        gated: torch.Tensor = GATED[activation](self(x, bias))
        return gated

    def targets(self, cut: Cut) -> dict[str, Target]:
        """Where the checkpoint's tensors of the weights go, by their names below the layer's owner."""
        raise NotImplementedError


class PlainWeights(LinearWeights):
    """Weights in the model's dtype."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.weight = _empty(cut.out_held, len(cut.inputs))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, self.weight, bias)

    def gated(self, x: Activations, bias: torch.Tensor | None, activation: str, quantize: bool) -> Activations:
        assert isinstance(x, torch.Tensor)
        return gated_linear(x, self.weight, bias, activation)

    def targets(self, cut: Cut) -> dict[str, Target]:
        columns = _slice(cut.inputs)
        return {
            f"{part.name}.weight": Target(
                (part.width, cut.in_features),
                tuple(Piece(self.weight.data[place], (taken, columns)) for place, taken in rows),
            )
            for part, rows in cut.rows()
        }


class Fp8Weights(LinearWeights):
    """float8_e4m3fn with a float32 scale for each output: fused parts that have one scale each keep their own.

    Activations are quantized token by token whatever the checkpoint says of them; of a divided input, each rank
    quantizes its share.
    """

    takes_quantized = True

    def __init__(self, cut: Cut, quantization: Fp8) -> None:
        super().__init__()
        self.scales = quantization.scales
        self.dtype = torch.get_default_dtype()  # of the results
        self.weight = _empty(cut.out_held, len(cut.inputs), dtype=_FLOAT8)
        self.weight_scale = _empty(cut.out_held, dtype=torch.float32)

    def forward(self, x: Activations, bias: torch.Tensor | None) -> torch.Tensor:
        values, scale = quantize_per_token(x) if isinstance(x, torch.Tensor) else x
        return fp8_product(values, scale, self.weight, self.weight_scale, self.dtype, bias)

    def gated(self, x: Activations, bias: torch.Tensor | None, activation: str, quantize: bool) -> Activations:
        values, scale = quantize_per_token(x) if isinstance(x, torch.Tensor) else x
        return fp8_gated_product(values, scale, self.weight, self.weight_scale, self.dtype, bias, activation, quantize)

    def targets(self, cut: Cut) -> dict[str, Target]:
        found = {}
        weight, scale, columns = self.weight.data, self.weight_scale.data, _slice(cut.inputs)
        for part, rows in cut.rows():
            shape = (part.width, cut.in_features)
            if self.scales == "none":
                quantized = tuple(QuantizedRows(weight[place], scale[place], taken, columns) for place, taken in rows)
                found[f"{part.name}.weight"] = Target(shape, quantized)
                continue
            pieces = tuple(Piece(weight[place], (taken, columns)) for place, taken in rows)
            found[f"{part.name}.weight"] = Target(shape, pieces, (_FLOAT8,))
            one = self.scales == "tensor"
            scales = tuple(Piece(scale[place], () if one else (taken,)) for place, taken in rows)
            width, same = (1, ()) if one else (part.width, (part.width, 1))
            found[f"{part.name}.weight_scale"] = Target((width,), scales, same_shapes=(same,))
        return found


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of an unquantized weight, quantized while they are loaded; their scales are of all inputs, held or not."""

    weight: torch.Tensor
    scale: torch.Tensor
    rows: slice
    columns: slice

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def fill(self, tensor: torch.Tensor) -> None:
        """Takes the rows of [out, in] and writes the share of them and their scales."""
        with torch.cuda.device_of(self.weight):  # which threads that load do not have as their current one
            values, scale = quantize_per_token(tensor[self.rows].to(self.device))
        self.weight.copy_(values[:, self.columns])
        self.scale.copy_(scale[:, 0])


class W4A16Weights(LinearWeights):
    """4-bit codes in the layout of ``kernels.awq_linear``, with a scale, and maybe a zero point, for each group."""

    def __init__(self, cut: Cut, quantization: W4A16) -> None:
        super().__init__()
        self.quantization = quantization
        self.whole_group_size = quantization.group_size or cut.in_features
        # Where a rank's inputs begin within a group, groups are cut into smaller ones that begin with them.
        self.group_size = math.gcd(self.whole_group_size, cut.inputs.start)
        self._check(cut)
        groups = -(-len(cut.inputs) // self.group_size)
        self.weight = _empty(cut.out_held, packed_width(len(cut.inputs)), dtype=torch.int32)
        self.weight_scale = _empty(groups, cut.out_held)
        self.weight_zero = _empty(groups, cut.out_held, dtype=torch.uint8) if quantization.zero_points else None

    def _check(self, cut: Cut) -> None:
        names = ", ".join(part.name for part in cut.parts)
        if cut.in_features % self.whole_group_size:
            raise UnsupportedModel(
                f"{names}: {cut.in_features} inputs are no multiple of the quantization's group size, "
                f"{self.whole_group_size}"
            )
        if self.group_size % 16:
            raise UnsupportedModel(
                f"{names}: groups of {self.whole_group_size} inputs, cut at input {cut.inputs.start}, leave groups of "
                f"{self.group_size}, not of a multiple of 16; choose another --tensor-parallel-size"
            )
        if self.quantization.packing == "awq" and (odd := [part.width for part in cut.parts if part.width % 8]):
            raise UnsupportedModel(f"{names}: {odd[0]} outputs are no multiple of 8, which AWQ packs together")

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return w4a16_linear(x, self.weight, self.weight_scale, self.weight_zero, self.group_size, bias)

    def targets(self, cut: Cut) -> dict[str, Target]:
        make = self._awq_targets if self.quantization.packing == "awq" else self._compressed_tensors_targets
        groups = torch.arange(cut.inputs.start, cut.inputs.stop, self.group_size) // self.whole_group_size
        found = {}
        for part, rows in cut.rows():
            codes = tuple(
                Piece(self.weight.data[place], (taken, _slice(cut.inputs)), encode=pack_weight) for place, taken in rows
            )
            scales = _group_pieces(self.weight_scale, groups, rows)
            zeros = () if self.weight_zero is None else _group_pieces(self.weight_zero, groups, rows)
            found.update(make(part, cut.in_features, codes, scales, zeros))
        return found

    def _awq_targets(
        self, part: Part, inputs: int, codes: "Pieces", scales: "Pieces", zeros: "Pieces"
    ) -> dict[str, Target]:
        """[in, out] and [groups, out], eight outputs in a word."""
        groups, words = inputs // self.whole_group_size, part.width // 8
        across = partial(unpack, order=AWQ_ORDER)
        return {
            f"{part.name}.qweight": _packed((inputs, words), codes, lambda words: across(words).T),
            f"{part.name}.scales": Target((groups, part.width), scales),
            f"{part.name}.qzeros": _packed((groups, words), zeros, across),
        }

    def _compressed_tensors_targets(
        self, part: Part, inputs: int, codes: "Pieces", scales: "Pieces", zeros: "Pieces"
    ) -> dict[str, Target]:
        """[out, in], eight inputs in a word, and [out, groups], eight outputs in a word of zero points."""
        groups = inputs // self.whole_group_size
        along = partial(unpack, order=CONSECUTIVE)
        found = {
            f"{part.name}.weight_packed": _packed((part.width, -(-inputs // 8)), codes, along),
            f"{part.name}.weight_scale": Target((part.width, groups), scales, decode=torch.t),
            f"{part.name}.weight_shape": Target((2,), (), (torch.int64, torch.int32), value=(part.width, inputs)),
        }
        if self.quantization.zero_points:
            shape = (-(-part.width // 8), groups)
            found[f"{part.name}.weight_zero_point"] = _packed(shape, zeros, lambda words: along(words.T))
        return found


Pieces = tuple[Piece, ...]


def make_weights(cut: Cut, quantization: Quantization | None) -> LinearWeights:
    """The form that holds a cut, empty, on torch's default device and dtype."""
    match quantization:
        case None:
            return PlainWeights(cut)
        case Fp8():
            return Fp8Weights(cut, quantization)
        case W4A16():
            return W4A16Weights(cut, quantization)


def quantization_of(config: ModelConfig, owner: str, parts: list[Part]) -> Quantization | None:
    """How a layer's weights are quantized, or None.

    Args:
        config: says so.
        owner: the dotted name of the module that owns the layer.
        parts: the checkpoint's tensors that are fused in the layer.

    Raises:
        UnsupportedModel: some of them are quantized and others are not.
    """
    if config.quantization is None:
        return None
    included = {part.name: config.quantization.modules.include(f"{owner}.{part.name}") for part in parts}
    if any(included.values()) and not all(included.values()):
        parted = ", ".join(f"{name} is {'' if quantized else 'not '}quantized" for name, quantized in included.items())
        raise UnsupportedModel(f"{owner}: {parted}; they are one product here, and must be alike")
    return config.quantization if any(included.values()) else None


def _empty(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _slice(held: range) -> slice:
    return slice(held.start, held.stop)


def _packed(shape: tuple[int, int], pieces: Pieces, decode: Callable[[torch.Tensor], torch.Tensor]) -> Target:
    return Target(shape, pieces, (torch.int32,), decode=decode)


def _group_pieces(parameter: nn.Parameter, groups: torch.Tensor, rows: list[tuple[slice, slice]]) -> Pieces:
    """Of [groups, out]: the groups and outputs held."""
    return tuple(Piece(parameter.data[:, place], (groups.to(parameter.device), taken)) for place, taken in rows)

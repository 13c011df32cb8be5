"""How the weights of a model's linear layers are quantized. Knows neither torch nor files."""

import re
from dataclasses import dataclass
from typing import Literal

from worker.config import ConfigError


@dataclass(frozen=True)
class Modules:
    """Which linear layers are quantized.

    Attributes:
        targets, ignored: a layer is quantized when one of the first and none of the second names it: by a regular
            expression after ``re:``, matched from the name's beginning; by "Linear", which is every layer; or by
            consecutive parts of its dotted name.
    """

    targets: tuple[str, ...] = ("Linear",)
    ignored: tuple[str, ...] = ()

    def include(self, name: str) -> bool:
        """Whether the layer of this name, such as ``model.layers.0.mlp.up_proj``, is quantized."""
        return any(_names(t, name) for t in self.targets) and not any(_names(i, name) for i in self.ignored)


def _names(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == "Linear" or f".{pattern}." in f".{name}."


@dataclass(frozen=True)
class Fp8:
    """Weights are float8_e4m3fn with scales; activations are quantized token by token.

    Attributes:
        scales: what the checkpoint has of them: one for a weight tensor, one for each output channel, or none: its
            weights are not quantized yet, and are while they are loaded, with a scale for each output channel.
        modules: the layers concerned.
    """

    scales: Literal["tensor", "channel", "none"]
    modules: Modules = Modules()

    @property
    def method(self) -> str:
        """As ``--quantization`` and the log name it."""
        return "fp8"


@dataclass(frozen=True)
class W4A16:
    """Weights are 4-bit codes; groups of them along the input share a scale, and a zero point. Activations stay.

    Attributes:
        packing: whose order the checkpoint's packed tensors have.
        group_size: in inputs; None is one group for all inputs.
        zero_points: whether the checkpoint has them.
        modules: the layers concerned.
    """

    packing: Literal["awq", "compressed-tensors"]
    group_size: int | None
    zero_points: bool
    modules: Modules = Modules()

    @property
    def method(self) -> str:
        """As ``--quantization`` and the log name it."""
        return "awq" if self.packing == "awq" else "compressed-tensors W4A16"


Quantization = Fp8 | W4A16


def choose_quantization(
    flag: str | None, found: Quantization | None, model: str, has_experts: bool
) -> Quantization | None:
    """What to do, given ``--quantization`` and what the checkpoint says.

    Raises:
        ConfigError: they contradict each other, or the flag asks for what cannot be done while loading.
    """
    if flag is None or (found is not None and found.method == flag):
        return found
    if found is not None:
        raise ConfigError(f"--quantization is {flag}, but {model} is quantized already ({found.method}); leave it out")
    if flag != "fp8":
        raise ConfigError(
            f"--quantization is {flag}, but {model} is not quantized, and {flag} cannot be made while loading; "
            f"serve a checkpoint that is quantized so, or use fp8"
        )
    if has_experts:
        raise ConfigError(f"--quantization is fp8, but {model} is a mixture of experts, which is served unquantized")
    return Fp8("none")

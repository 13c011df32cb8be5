"""Says which piece of a checkpoint's tensor goes where: what layers tell the loader."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

UNQUANTIZED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Filling(Protocol):
    """Fills a part of one or more parameters from a checkpoint's tensor."""

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""

    def fill(self, tensor: torch.Tensor) -> None:
        """Takes what it needs of the whole tensor."""


@dataclass(frozen=True)
class Piece:
    """A block of a checkpoint's tensor and the part of a parameter that it fills, of the same shape or broadcast to it.

    Attributes:
        parameter: the part to fill.
        index: the block; a tensor in it is of positions, int64.
        encode: turns the block into what the parameter holds.
    """

    parameter: torch.Tensor
    index: tuple[slice | torch.Tensor, ...]
    encode: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.parameter.device

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies the block, converting its dtype."""
        block = tensor[self.index]
        self.parameter.copy_(block if self.encode is None else self.encode(block))


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes.

    Attributes:
        shape: of the whole tensor, whatever share of it is held here.
        pieces: none when nothing of it is held here.
        dtypes: those that the tensor may have.
        same_shapes: other shapes that it may have instead; it is reshaped.
        decode: turns the whole tensor, on the device, into the one that pieces are taken from.
        value: the integers that the tensor must hold; None: any.
    """

    shape: tuple[int, ...]
    pieces: tuple[Filling, ...]
    dtypes: tuple[torch.dtype, ...] = UNQUANTIZED
    same_shapes: tuple[tuple[int, ...], ...] = ()
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None
    value: tuple[int, ...] | None = None

    @classmethod
    def whole(cls, parameter: torch.Tensor) -> "Target":
        """The tensor fills the parameter."""
        return cls(tuple(parameter.shape), (Piece(parameter, ()),))

    def fill(self, tensor: torch.Tensor) -> None:
        """Fills the pieces from the tensor, which has one of the shapes and dtypes."""
        if not self.pieces:
            return
        tensor = tensor.reshape(self.shape)
        if self.decode is not None:
            tensor = self.decode(tensor.to(self.pieces[0].device))
        for piece in self.pieces:
            piece.fill(tensor)


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor among those fused in a projection.

    Attributes:
        name: of the tensor, without ``.weight``.
        width: output features, which are its rows.
        held: the rows that this rank holds, in the order in which it holds them.
    """

    name: str
    width: int
    held: tuple[range, ...]


def part(name: str, *sections: tuple[int, range]) -> Part:
    """A tensor made of sections one after another, each given by its width and the rows of it to hold."""
    start = 0
    held = []
    for width, rows in sections:
        held.append(range(start + rows.start, start + rows.stop))
        start += width
    return Part(name, start, tuple(held))


def scaled(heads: range, size: int) -> range:
    """The rows of consecutive heads of ``size`` rows each."""
    return range(heads.start * size, heads.stop * size)

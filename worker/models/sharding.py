"""Says which piece of a checkpoint's tensor goes where: what layers tell the loader."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """A block of a checkpoint's tensor and the part of a parameter that it fills, of the same shape."""

    parameter: torch.Tensor
    index: tuple[slice, ...]


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes.

    Attributes:
        shape: of the whole tensor, whatever share of it is held here.
        pieces: none when nothing of it is held here.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, parameter: torch.Tensor) -> "Target":
        """The tensor fills the parameter."""
        return cls(tuple(parameter.shape), (Piece(parameter, ()),))

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies the pieces, converting their dtype."""
        for piece in self.pieces:
            piece.parameter.copy_(tensor[piece.index])


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

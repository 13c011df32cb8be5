"""The parts of a message: what a parser makes of the model's text, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of a tool begins; the Arguments that follow are its own."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments, as the model wrote them: a call's pieces together are meant to be a JSON object."""

    text: str


Part = Content | Reasoning | CallStart | Arguments


def joined(parts: list[Part]) -> list[Part]:
    """The parts with neighbours of one kind made one."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, CallStart) or type(last) is not type(part):
            whole.append(part)
        else:
            assert last is not None
            assert not isinstance(last, CallStart)
            whole[-1] = type(last)(last.text + part.text)
    return whole

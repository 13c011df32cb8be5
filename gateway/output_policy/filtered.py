"""Applies a key's policy to the pieces of a generation."""

from collections.abc import AsyncIterator
from dataclasses import replace

from gateway.generation import Ending, Generation, Piece
from gateway.output_policy.text_filter import CompiledPolicy, TextFilter


async def filtered(generation: Generation, policy: CompiledPolicy) -> AsyncIterator[Piece]:
    """The pieces that may be seen. A choice that is ended by the policy is no longer generated for."""
    filters = [TextFilter(policy) for _ in range(generation.num_choices)]
    async for piece in generation.pieces():
        one = filters[piece.index]
        text = one.push(piece.text)
        if piece.ending is not None and not one.ended:
            text += one.finish()
        if text:
            yield replace(piece, text=text, ending=None)
        if generation.is_cut(piece.index):  # what reads the pieces has found a match in what they come to
            continue
        if piece.ending is not None:
            yield Piece(piece.index, ending=_ending(one, piece.ending))
        elif one.ended:
            ending = _ending(one, Ending("length", None))
            generation.cut(piece.index, ending.reason)
            yield Piece(piece.index, ending=ending)


def _ending(one: TextFilter, ending: Ending) -> Ending:
    if one.matched:
        return Ending("content_filter", None)
    return Ending("length", None) if one.ended else ending

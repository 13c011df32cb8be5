"""Drafts by prompt lookup (Saxena, 2023): what followed the last tokens where they stood before."""

from array import array

from worker.sequence import Sequence


class NgramDrafter:
    """Copies from the sequence's own tokens; no model takes part.

    Args:
        longest, shortest: how many of the last tokens to look for. More tokens in common win over fewer; among equals,
            the latest place does.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest = longest
        self.shortest = shortest

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Drafts of each sequence: as many as wanted, or none."""
        return [continue_ngram(seq.tokens, count, self.longest, self.shortest) for seq, count in wanted]


def continue_ngram(tokens: "array[int]", count: int, longest: int, shortest: int) -> list[int]:
    """The ``count`` tokens after the latest earlier place of the last ``longest`` to ``shortest`` tokens.

    Where the tokens end before that, the copy goes on with itself: a text that repeats is expected to go on repeating.
    Empty when the last tokens did not stand anywhere before.
    """
    width = tokens.itemsize
    text = tokens.tobytes()  # bytes are searched faster than integers can be compared one by one
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        wanted = text[-size * width :]
        end = len(text) - width
        while (place := text.rfind(wanted, 0, end)) % width and place >= 0:
            end = place + len(wanted) - 1  # it began within a token
        if place >= 0:
            source = place // width + size
            period = len(tokens) - source
            return [tokens[source + index % period] for index in range(count)]
    return []

"""Whether drafting for a sequence pays: how many of its drafts were accepted of late."""

from dataclasses import dataclass

# A rejected draft costs a row of every product and, on a GPU, a step without its graph. Five steps in which
# nothing is accepted end it at first, two after a pause.
_WEIGHT = 0.25
_LOWEST = 0.25
_AFTER_PAUSE = 0.4
_PAUSE = 64


@dataclass(slots=True)
class AcceptanceRate:
    """Exponential average of the share of a sequence's drafts that was accepted.

    Attributes:
        value: from 0 to 1; begins with the benefit of the doubt.
        resumes_at: length of the sequence, in tokens, from which on drafts are made.
    """

    value: float = 1.0
    resumes_at: int = 0

    def record(self, accepted: int, drafted: int, length: int) -> None:
        """Takes in a step with drafts. When too few were accepted of late, there are none for the next 64 tokens.

        Args:
            accepted, drafted: drafts of the step; at least one was drafted.
            length: tokens of the sequence after it.
        """
        self.value += _WEIGHT * (accepted / drafted - self.value)
        if self.value < _LOWEST:
            self.value = _AFTER_PAUSE
            self.resumes_at = length + _PAUSE

"""Decides which decoding sequences get drafts, and which drafts were right. Knows no tensors.

A draft is accepted when it is the token that is sampled at its place, from the logits that the tokens before it give
and with the random numbers of its place. So a sequence's output is what it would be without drafts; only the number of
steps differs. Rejection sampling (Leviathan et al., 2023) would accept more where sampling is random, but outputs would
then depend on what was drafted.
"""

from collections.abc import Iterator
from typing import Protocol

from worker.sequence import Sequence
from worker.speculation.acceptance import AcceptanceRate
from worker.step_plan import StepPlan

# Samples that a step may have even if fewer sequences run: each takes as many floats as the vocabulary has tokens.
_SAMPLES_AT_ONCE = 64


def most_samples(max_num_seqs: int) -> int:
    """Most tokens that a step with drafts samples."""
    return max(max_num_seqs, _SAMPLES_AT_ONCE)


class Drafter(Protocol):
    """Guesses how sequences go on."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """At most as many tokens as wanted for each sequence, of which all tokens are known; empty: no idea."""


class Speculator:
    """Makes drafts, and keeps count of them.

    Args:
        drafter: makes them.
        num_speculative_tokens: most drafts of a sequence in a step.

    Attributes:
        num_draft_tokens, num_accepted_tokens: drafts verified since the start, and those that were right.
    """

    def __init__(self, drafter: Drafter, num_speculative_tokens: int) -> None:
        self._drafter = drafter
        self._most = num_speculative_tokens
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def wants(self, seq: Sequence) -> int:
        """Most drafts that a decoding sequence may get now.

        None while its acceptance is low, nor where a grammar is followed, whose masks need the tokens before them.
        None that could only come after its last token: the step itself samples one more than there are drafts.
        """
        rate, length = seq.acceptance, seq.total_len
        if seq.automaton is not None or (rate is not None and length < rate.resumes_at):
            return 0
        if length <= seq.num_prompt_tokens:
            return 0  # the prompt's last token, computed alone
        return max(0, min(self._most, seq.last_len - length - 1))

    def propose(self, decodes: list[Sequence], budget: int) -> Iterator[tuple[Sequence, list[int]]]:
        """Drafts of decoding sequences of which all tokens are known, in their order; at most ``budget`` in all.

        The drafter is asked for as many as there is room for, and again when it had fewer.
        """
        wanted = [(seq, most) for seq in decodes if not seq.num_pending and (most := self.wants(seq))]
        place = 0
        while budget > 0 and place < len(wanted):
            asked: list[tuple[Sequence, int]] = []
            room = budget
            while room > 0 and place < len(wanted):
                seq, most = wanted[place]
                asked.append((seq, min(most, room)))
                room -= most
                place += 1
            for (seq, _), drafts in zip(asked, self._drafter.propose(asked), strict=True):
                if drafts:
                    budget -= len(drafts)
                    yield seq, drafts

    def verify(self, plan: StepPlan, ids: list[int]) -> set[int]:
        """Accepts the drafts of a step that were right; their keys and values are in the cache, and stay.

        Args:
            plan: the step.
            ids: what was sampled.

        Returns:
            The samples that come to nothing: they follow drafts that were wrong.
        """
        dropped: set[int] = set()
        for first, drafts in plan.drafts.items():
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == ids[first + accepted]:
                accepted += 1
            dropped.update(range(first + accepted + 1, first + len(drafts) + 1))
            self.num_draft_tokens += len(drafts)
            self.num_accepted_tokens += accepted
            seq = plan.sequences[plan.samples[first]]
            if not seq.finished:
                seq.num_computed += accepted
                seq.num_pending += accepted
                seq.acceptance = seq.acceptance or AcceptanceRate()
                seq.acceptance.record(accepted, len(drafts), seq.total_len)
        return dropped

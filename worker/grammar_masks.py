"""Which tokens the grammars of a step's sequences leave possible, as bitmasks for the device."""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from worker.sequence import Sequence
from worker.step_plan import StepPlan

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from worker.grammar import Automaton

_MAX_THREADS = 8
_ALL = 0xFFFFFFFF

Bits = NDArray[np.uint32]


@dataclass(frozen=True)
class StepMasks:
    """What a step's grammars say.

    Attributes:
        bitmask: [constrained, words] int32, in the order of ``StepPlan.constrained``. Bit i % 32 of word i // 32 is set
            where token i is possible. All bits are set in rows of sequences that have ended.
        ended: sequences to which nothing can be added, with what is wrong; empty when their output is complete.
    """

    bitmask: NDArray[np.int32]
    ended: list[tuple[Sequence, str]] = field(default_factory=list)


class GrammarMasks:
    """Fills the masks of each step, several sequences side by side and without the interpreter's lock."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, plan: StepPlan) -> StepMasks:
        """The masks of a plan's constrained samples. All tokens before them must be known to their automata."""
        running = []
        for row, place in enumerate(plan.constrained):
            seq = plan.sequences[plan.samples[place]]
            automaton = seq.automaton
            assert automaton is not None
            words = automaton.vocab_size // 32 + 1
            if not seq.finished:
                running.append((row, seq, automaton, plan.banned.get(place, [])))
        bits = np.full((len(plan.constrained), words), _ALL, dtype=np.uint32)
        if running:
            self._compute([(automaton.matcher, row) for row, _, automaton, _ in running], bits)
        masks = StepMasks(bits.view(np.int32))
        for row, seq, automaton, banned in running:
            may_end = _take_end(bits[row], automaton.vocab_size)
            if automaton.failure:
                error = (
                    f"{automaton.constraint.kind} cannot be followed after {seq.num_output} tokens: {automaton.failure}"
                )
            elif _restrict(bits[row], seq, banned, may_end):
                continue
            else:
                error = "" if may_end else _why_stuck(seq, automaton)
            masks.ended.append((seq, error))
            bits[row] = _ALL
        return masks

    def _compute(self, rows: "list[tuple[LLMatcher, int]]", bits: Bits) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
        self._executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.shape[1] * 4, len(bits))


def _take_end(bits: Bits, vocab_size: int) -> bool:
    """Clears the bit after the last token, and says whether it was set: whether the output may end here."""
    word, bit = divmod(vocab_size, 32)
    may_end = bool(bits[word] >> np.uint32(bit) & np.uint32(1))
    bits[word] &= np.uint32((1 << bit) - 1)
    return may_end


def _restrict(bits: Bits, seq: Sequence, banned: list[int], may_end: bool) -> bool:
    """Takes away what the sequence's other rules forbid, and sorts out what ends it. False: no text can follow."""
    ends = list(seq.stop_token_ids)
    # A token that ends the sequence is not shown, so it cannot be a part of the text.
    _clear(bits, ends)
    _clear(bits, banned)
    if seq.sampling.allowed_token_ids:
        bits &= _set_bits(seq.sampling.allowed_token_ids, len(bits))
    if not bits.any():
        return False
    if may_end:
        bits |= _set_bits(ends, len(bits))
        _clear(bits, banned)
    return True


def _why_stuck(seq: Sequence, automaton: "Automaton") -> str:
    return (
        f"after {seq.num_output} tokens, the request's other fields (allowed_token_ids, bad_words, stop_token_ids) "
        f"leave no token that {automaton.constraint.kind} asks for"
    )


def _set_bits(token_ids: "list[int] | tuple[int, ...]", words: int) -> Bits:
    bits = np.zeros(words, dtype=np.uint32)
    ids = np.array(token_ids, dtype=np.uint32)
    np.bitwise_or.at(bits, ids >> np.uint32(5), np.uint32(1) << (ids & np.uint32(31)))
    return bits


def _clear(bits: Bits, token_ids: list[int]) -> None:
    if token_ids:
        bits &= ~_set_bits(token_ids, len(bits))

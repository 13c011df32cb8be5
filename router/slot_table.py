"""The slots of one worker's stream: which choice runs in which, and how rows of a StepBatch find their way to it.

A slot is taken from ``bind`` until the worker says that its sequence ended, even when the router lost interest before:
until then the worker still computes it. The generation tells late messages of an earlier sequence apart.
"""

from collections.abc import Iterator

from protos import worker_pb2
from router.request import Choice
from router.token_logprobs import OutOfStep


class SlotTable:
    """All slots of one stream.

    Args:
        size: how many the worker grants.

    Attributes:
        tokens: prompt and output tokens of all sequences in slots.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens = 0
        self._free = list(range(size - 1, -1, -1))
        self._generations = [0] * size
        self._taken = [False] * size
        self._choices: list[Choice | None] = [None] * size
        self._slot_tokens = [0] * size

    @property
    def running(self) -> int:
        """Slots that are taken."""
        return self.size - len(self._free)

    @property
    def has_free(self) -> bool:
        """Whether ``bind`` will find a slot."""
        return bool(self._free)

    def generation(self, slot: int) -> int:
        """The generation of a slot's last sequence."""
        return self._generations[slot]

    def choices(self) -> Iterator[Choice]:
        """The choices in slots, but not those that the router lost interest in."""
        return (choice for choice in self._choices if choice is not None)

    def bind(self, choice: Choice) -> tuple[int, int]:
        """Gives a choice a slot. Returns its number and generation."""
        slot = self._free.pop()
        self._generations[slot] += 1
        self._taken[slot] = True
        self._choices[slot] = choice
        self._slot_tokens[slot] = choice.request.prompt_tokens + len(choice.token_ids)
        self.tokens += self._slot_tokens[slot]
        return slot, self._generations[slot]

    def forget(self, slot: int) -> int:
        """The router lost interest in a slot's sequence; its rows are dropped from now on. Returns its generation."""
        self._choices[slot] = None
        return self._generations[slot]

    def find(self, slot: int, generation: int) -> Choice | None:
        """The choice that a message is about, unless it is forgotten or its time is over."""
        if slot < self.size and self._generations[slot] == generation:
            return self._choices[slot]
        return None

    def free(self, slot: int, generation: int) -> None:
        """The worker has done with a sequence: frees its slot, unless it was freed before."""
        if slot < self.size and self._generations[slot] == generation and self._taken[slot]:
            self._taken[slot] = False
            self._choices[slot] = None
            self.tokens -= self._slot_tokens[slot]
            self._free.append(slot)

    def deliver(self, batch: worker_pb2.StepBatch) -> list[int]:
        """Hands a batch's tokens to the choices they belong to. This loop sees every token that the router passes on.

        Returns:
            Slots whose choice was ended by a stop string or is paused: forgotten already, but the worker does not know
            yet.

        Raises:
            OutOfStep: tokens are missing, or the batch contradicts itself.
        """
        slots, generations = list(batch.slots), list(batch.generations)
        first_indices, counts, token_ids = list(batch.first_indices), list(batch.counts), list(batch.token_ids)
        if not len(slots) == len(generations) == len(first_indices) == len(counts) or sum(counts) != len(token_ids):
            raise OutOfStep(f"the columns of step {batch.step} differ in length")
        if slots and max(slots) >= self.size:
            raise OutOfStep(f"step {batch.step} names slot {max(slots)} of {self.size}")
        choices, current, slot_tokens = self._choices, self._generations, self._slot_tokens
        stopped = []
        start = 0
        for slot, generation, first_index, count in zip(slots, generations, first_indices, counts, strict=True):
            end = start + count
            choice = choices[slot]
            if choice is not None and current[slot] == generation:
                slot_tokens[slot] += count
                self.tokens += count
                if choice.take(first_index, token_ids[start:end]):
                    choices[slot] = choice.link = None
                    stopped.append(slot)
            start = end
        return stopped

"""What clients asked for and what they saw, and a checker that compares it with what must have been generated."""

import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache

from protos import inference_pb2, sampling_pb2
from tests.chaos.scripted_engine import (
    FIRST_TOKEN,
    NUM_TOKENS,
    STOP_TOKEN,
    allowed_token,
    drawn,
    fold,
    token_of,
    word,
)

STOP, LENGTH = sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH


@dataclass(frozen=True)
class Order:
    """A request.

    Attributes:
        seed: None for greedy; choice i draws with seed + i.
        shape: the letters that each word of the output may begin with, where it must have a shape.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    n: int
    shape: tuple[str, ...] = ()

    @property
    def regex(self) -> str:
        """The shape as the request says it; empty: none."""
        return "".join(f"[{letters}][a-j][a-j]" for letters in self.shape)

    def expected(self, index: int) -> list[int]:
        """The output of choice ``index``, the token that ends it included."""
        state = 0
        for token in self.prompt:
            state = fold(state, token)
        seed = None if self.seed is None else self.seed + index
        output: list[int] = []
        while len(output) < self.max_tokens and not self.stops(output):
            draw = drawn(state, seed, len(output))
            token = allowed_token(draw, _beginning(self.shape[len(output)])) if self.shape else token_of(draw)
            output.append(token)
            state = fold(state, token)
        return output

    def stops(self, output: list[int]) -> bool:
        """Whether nothing can follow an output."""
        return len(output) == len(self.shape) if self.shape else output[-1:] == [STOP_TOKEN]


@lru_cache
def _beginning(letters: str) -> list[int]:
    """The tokens whose words begin with one of these letters."""
    return [token for token in range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS) if word(token)[0] in letters]


@dataclass
class Seen:
    """All that came of a request, in the order in which it came.

    Attributes:
        deltas: (choice, index of the first id, ids).
        finished: by choice; each must come once, and nothing of the choice after it.
        error: the status of the call, if it failed.
        moves: how often it went on at another worker.
    """

    order: Order
    deltas: list[tuple[int, int, list[int]]] = field(default_factory=list)
    finished: list[inference_pb2.Finished] = field(default_factory=list)
    error: str = ""
    moves: int = 0

    def add(self, event: inference_pb2.GenerateEvent) -> None:
        match event.WhichOneof("event"):
            case "delta":
                delta = event.delta
                if any(finished.index == delta.index for finished in self.finished):
                    self.error = f"choice {delta.index} went on after its end"
                self.deltas.append((delta.index, delta.first_index, list(delta.token_ids)))
            case "finished":
                self.finished.append(event.finished)


@dataclass(frozen=True)
class WorkerAtRest:
    """What a worker says of itself when nothing runs."""

    name: str
    running: int
    waiting: int
    unreferenced_blocks: int
    num_blocks: int


def faults_in(seen: Seen) -> list[str]:
    """What is wrong with a request's history; empty: nothing."""
    order = seen.order
    if seen.error:
        return [f"{order.id}: failed: {seen.error}"]
    wrong = []
    if sorted(finished.index for finished in seen.finished) != list(range(order.n)):
        wrong.append(f"{order.id}: {len(seen.finished)} endings of {order.n} choices")
    for index in range(order.n):
        ids: list[int] = []
        for choice, first, new in seen.deltas:
            if choice == index:
                if first != len(ids):
                    wrong.append(f"{order.id}.{index}: index {first} follows {len(ids)} tokens")
                ids += new
        expected = order.expected(index)
        if ids != expected:
            at = next((i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), None)
            where = f"differs at {at}" if at is not None else f"has {len(ids)} tokens, not {len(expected)}"
            wrong.append(f"{order.id}.{index}: the output {where}")
        for finished in seen.finished:
            if finished.index == index:
                wrong += _faults_in_ending(f"{order.id}.{index}", order, expected, finished)
    return wrong


def _faults_in_ending(name: str, order: Order, expected: list[int], finished: inference_pb2.Finished) -> list[str]:
    wrong = []
    reason = STOP if order.stops(expected) else LENGTH
    if finished.reason != reason:
        wrong.append(f"{name}: ended by {finished.reason}, not {reason}")
    usage = finished.usage
    if (usage.prompt_tokens, usage.completion_tokens) != (len(order.prompt), len(expected)):
        wrong.append(f"{name}: usage {usage.prompt_tokens} + {usage.completion_tokens} tokens")
    if usage.cached_tokens >= len(order.prompt):
        wrong.append(f"{name}: {usage.cached_tokens} tokens of the prompt cached, and one must be computed")
    return wrong


def faults_at_rest(workers: list[WorkerAtRest]) -> list[str]:
    """What workers still hold though nothing runs; empty: nothing."""
    return [
        f"{dataclasses.astuple(worker)}: holds sequences or blocks"
        for worker in workers
        if worker.running or worker.waiting or worker.unreferenced_blocks != worker.num_blocks
    ]

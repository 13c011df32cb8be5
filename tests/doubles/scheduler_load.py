"""Random loads for the scheduler, and all that must hold under any of them."""

import random
from collections import Counter, deque
from dataclasses import dataclass

from hypothesis import strategies as st

from protos.prefix import chain_root, extend_chain
from tests.doubles.fake_runner import STOP, VOCAB, FakeRunner, next_token
from worker.block_pool import BlockPool
from worker.engine import Engine
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, SamplingParams, Sequence, SequenceStatus, token_array
from worker.speculation.speculator import Speculator
from worker.step_plan import StepOutput

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 4
# Steps in which sequences are cancelled (later, that would hide one that starves), and after which none should be left.
LAST_CANCEL = 60
LAST_STEP = 3_000


def oracle(prompt: list[int], max_tokens: int) -> list[int]:
    """The fake model's output."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP or len(tokens) - len(prompt) == max_tokens:
            return tokens[len(prompt) :]


def make_sequence(prompt: list[int], max_tokens: int, salt: bytes = b"", **fields) -> Sequence:
    tokens = token_array()
    tokens.extend(prompt)
    return Sequence(
        "test", tokens, GREEDY, max_tokens, stop_token_ids=frozenset([STOP]), cache_root=chain_root(salt), **fields
    )


class Guesser:
    """Drafts what the fake model will say, but for some tokens; now and then fewer than wanted, or none.

    Args:
        seed: of which ones.
        accuracy: share of the drafts that are right.
    """

    def __init__(self, seed: int, accuracy: float) -> None:
        self._chance = random.Random(seed)
        self._accuracy = accuracy

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._drafts(list(seq.tokens), self._chance.randint(0, most)) for seq, most in wanted]

    def _drafts(self, tokens: list[int], count: int) -> list[int]:
        for _ in range(count):
            right = next_token(tokens)
            tokens.append(right if self._chance.random() < self._accuracy else (right + 1) % VOCAB)
        return tokens[len(tokens) - count :]


@dataclass(frozen=True)
class Arrival:
    """A request."""

    prompt: list[int]
    max_tokens: int
    salt: bytes
    priority: int
    skip: bool


@dataclass(frozen=True)
class Load:
    """Requests, the engine that they meet, and the seed of when they come and which are cancelled."""

    arrivals: list[Arrival]
    seed: int
    num_blocks: int
    max_num_seqs: int
    budget: int
    caching: bool
    async_scheduling: bool
    threshold: int
    with_decodes: int
    drafts: int
    accuracy: float


# Lengths are drawn as numbers, since lists of any length are mostly short ones, which never fill a pool.
prompts = st.builds(
    lambda shared, length, own: [shared] * length + own,
    shared=st.integers(0, 1),
    length=st.integers(1, 27),
    own=st.lists(st.integers(0, 3), max_size=3),
)
arrivals = st.builds(
    Arrival,
    prompt=prompts,
    max_tokens=st.integers(1, 20),
    salt=st.sampled_from([b"", b"tenant"]),
    priority=st.sampled_from([0, 0, 0, -1, 5]),
    skip=st.sampled_from([False, False, True]),
)
loads = st.builds(
    Load,
    arrivals=st.integers(1, 16).flatmap(lambda count: st.lists(arrivals, min_size=count, max_size=count)),
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(13, 30),  # the longest sequence fits
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
    caching=st.booleans(),
    async_scheduling=st.booleans(),
    threshold=st.sampled_from([0, 3]),
    with_decodes=st.sampled_from([0, 1, 5]),
    drafts=st.sampled_from([0, 1, 4, 9]),
    accuracy=st.sampled_from([0.2, 0.8, 1.0]),
)


def named_blocks(arrival: Arrival) -> list[tuple[bytes, list[int]]]:
    """Names and tokens of all full blocks that the request may fill."""
    tokens = token_array()
    tokens.extend([*arrival.prompt, *oracle(arrival.prompt, arrival.max_tokens)])
    full = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
    root = chain_root(arrival.salt)
    names = extend_chain(root, root, memoryview(tokens)[:full].cast("B"), BLOCK_SIZE)
    return [(name, tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE].tolist()) for i, name in enumerate(names)]


class LoadCheck:
    """One load on one engine, watched at every step.

    Args:
        scheduler, pool: classes, so that broken ones can be tried.
    """

    def __init__(self, load: Load, scheduler: type[Scheduler] = Scheduler, pool: type[BlockPool] = BlockPool) -> None:
        self.load = load
        self.pool = pool(load.num_blocks, load.caching)
        speculator = Speculator(Guesser(load.seed, load.accuracy), load.drafts) if load.drafts else None
        self.scheduler = scheduler(
            self.pool, BLOCK_SIZE, load.max_num_seqs, load.budget, load.threshold, load.with_decodes, speculator
        )
        self.runner = FakeRunner(load.num_blocks, BLOCK_SIZE, load.max_num_seqs, load.budget, load.with_decodes)
        self.engine = Engine(self.scheduler, self.runner, load.async_scheduling)
        self.everyone: dict[Sequence, Arrival] = {
            make_sequence(
                each.prompt, each.max_tokens, each.salt, priority=each.priority, skip_reading_prefix_cache=each.skip
            ): each
            for each in load.arrivals
        }
        self.turns: dict[Sequence, tuple[int, int]] = {}
        self.outputs: dict[Sequence, list[int]] = {seq: [] for seq in self.everyone}
        self.ended: set[Sequence] = set()
        self.names: set[bytes] = set()
        self.contents = dict(content for arrival in load.arrivals for content in named_blocks(arrival))

    def run(self) -> None:
        """The whole load. Raises AssertionError when something does not hold."""
        chance = random.Random(self.load.seed)
        self.pool.record_changes()
        todo = deque(self.everyone)
        for step in range(LAST_STEP):
            while todo and chance.random() < 0.5:
                seq = todo.popleft()
                self.turns[seq] = (self.everyone[seq].priority, len(self.turns))
                self.engine.add(seq)
            alive = [seq for seq in self.turns if not seq.finished]
            if alive and step < LAST_CANCEL and chance.random() < 0.05:
                self.engine.cancel(chance.choice(alive))
            running = set(self.scheduler.running)
            output = self.engine.step()
            self._check_order(running)
            self._check_books()
            self._check_output(output)
            if not todo and not self.engine.has_unfinished:
                break
        assert self.ended == set(self.everyone), "a sequence starved"
        for seq, arrival in self.everyone.items():
            self._check_end(seq, arrival)
        assert self.pool.num_available == self.load.num_blocks, "a block leaked"
        if not self.load.caching:
            assert self.pool.num_cached == 0

    def _check_order(self, ran_before: set[Sequence]) -> None:
        """Whoever runs comes before whoever was preempted, or waited when it was admitted."""
        running, waiting = set(self.scheduler.running), self.scheduler.waiting
        assert len(running) == len(self.scheduler.running) <= self.load.max_num_seqs
        preempted = [self.turns[seq] for seq in ran_before if seq.status is SequenceStatus.WAITING]
        for seq in running:
            passed = preempted if seq in ran_before else [self.turns[other] for other in waiting]
            assert all(self.turns[seq] < turn for turn in passed), "a sequence ran before its turn"

    def _check_books(self) -> None:
        """Nobody is lost, the pool balances, counts the references that there are, and told of the names it knows."""
        alive = {seq for seq in self.turns if not seq.finished}
        assert Counter((*self.scheduler.running, *self.scheduler.waiting)) == Counter(alive), "a sequence is in no list"
        self.pool.check()
        held = Counter(block for seq in self.scheduler.running for block in seq.blocks)
        for block, references in enumerate(self.pool._references):
            assert references == held[block], f"block {block} has {references} references and {held[block]} holders"
        changes = self.pool.take_changes()
        assert not changes.cleared
        self.names -= set(changes.removed)
        self.names |= set(changes.stored)
        assert self.names == set(self.pool.names()), "the names told are not the names known"
        for name, block in self.pool._by_name.items():
            tokens = self.runner.cache[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            assert tokens == self.contents.get(name), f"what block {block} holds is not that of its name"

    def _check_output(self, output: StepOutput) -> None:
        """Tokens come one after another, and none after the end."""
        for seq, first, ids in output.tokens:
            assert seq not in self.ended, "a token came after the end"
            assert first == len(self.outputs[seq]), "an output index was skipped or repeated"
            self.outputs[seq].extend(ids)
        for seq in output.finished:
            assert seq not in self.ended, "a sequence ended twice"
            self.ended.add(seq)

    def _check_end(self, seq: Sequence, arrival: Arrival) -> None:
        """The output is the oracle's, or the beginning of it when it was cancelled."""
        want, got = oracle(arrival.prompt, arrival.max_tokens), self.outputs[seq]
        if seq.finish_reason is FinishReason.CANCELLED:
            assert got == want[: len(got)], "the output is wrong"
        else:
            assert got == want, "the output is wrong"
            assert seq.finish_reason is (FinishReason.STOP if want[-1] == STOP else FinishReason.LENGTH)
        if arrival.skip:
            assert not seq.num_cached_tokens, "the prefix cache was read though it should not be"

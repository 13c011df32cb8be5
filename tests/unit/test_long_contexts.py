"""Many long contexts on a pool that holds a third of them: they wait their turn, none fails and none starves."""

import random

import numpy as np

from tests.doubles.fake_runner import FakeRunner, Launched
from worker.block_pool import BlockPool
from worker.engine import Engine
from worker.scheduler import Scheduler
from worker.sequence import FinishReason, SamplingParams, Sequence, token_array
from worker.step_plan import StepPlan

STREAMS, CONTEXT, OUTPUT = 64, 32_768, 200
BLOCK, BUDGET = 16, 8192
# A third of the prompts fits, but not all that they generate: some must be preempted.
NUM_BLOCKS = 22 * (CONTEXT - OUTPUT) // BLOCK + 100
VOCAB = 50_000


class HashRunner(FakeRunner):
    """A fake model that reads the whole context through the block table, quickly."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK, STREAMS, BUDGET)
        self._tokens = np.full((NUM_BLOCKS, BLOCK), -1, dtype=np.int64)

    def launch(self, plan: StepPlan) -> Launched:
        assert len(plan.token_ids) == sum(plan.counts) <= self.budget
        ids = np.array(plan.token_ids, dtype=np.int64)
        offset = 0
        contexts = []
        for row, start, count, table in zip(plan.rows, plan.starts, plan.counts, plan.block_tables, strict=True):
            for place in range(offset, offset + count) if plan.device_tokens else ():
                if place in plan.device_tokens:
                    ids[place] = self.last[row]
            blocks = np.array(table)
            positions = np.arange(start, start + count)
            self._tokens[blocks[positions // BLOCK], positions % BLOCK] = ids[offset : offset + count]
            contexts.append((blocks, start + count))
            offset += count
        sampled = []
        for index in plan.samples:
            blocks, length = contexts[index]
            context = self._tokens[blocks].ravel()[:length]
            assert context.min() >= 0, "a slot is read that was never written"
            sampled.append(next_token(context))
        for index, token in zip(plan.samples, sampled, strict=True):
            self.last[plan.rows[index]] = token
        return Launched(sampled)


def next_token(context: np.ndarray) -> int:
    return int((context * (np.arange(len(context)) % 8191 + 1)).sum() % VOCAB)


def test_three_times_more_context_than_there_is_memory():
    chance = random.Random(0)
    pool = BlockPool(NUM_BLOCKS)
    scheduler = Scheduler(pool, BLOCK, STREAMS, BUDGET)
    engine = Engine(scheduler, HashRunner(), async_scheduling=True)
    prompts = [chance.choices(range(VOCAB), k=CONTEXT - OUTPUT) for _ in range(STREAMS)]
    sequences = []
    for number, prompt in enumerate(prompts):
        tokens = token_array()
        tokens.extend(prompt)
        sequences.append(Sequence(f"s{number}", tokens, SamplingParams(temperature=0.0), OUTPUT, frozenset()))
        engine.add(sequences[-1])
    ended: dict[Sequence, int] = {}
    steps = 0
    while engine.has_unfinished:
        output = engine.step()
        steps += 1
        ended.update((seq, steps) for seq in output.finished)
    assert [seq.finish_reason for seq in sequences] == [FinishReason.LENGTH] * STREAMS
    for seq, prompt in zip(sequences, prompts, strict=True):
        context = np.array(seq.tokens)
        assert list(context[: len(prompt)]) == prompt
        for length in (len(prompt), len(prompt) + 1, len(prompt) + OUTPUT // 2, len(context) - 1):
            assert context[length] == next_token(context[:length])
    assert pool.num_free + pool.num_cached == NUM_BLOCKS
    # Nobody is overtaken by who came much later, and hardly anything is computed twice.
    places = sorted(range(STREAMS), key=lambda place: ended[sequences[place]])
    assert all(abs(place - turn) <= 2 for turn, place in enumerate(places)), places
    assert 1 <= scheduler.num_preemptions <= 8
    assert steps <= 1.1 * (STREAMS * CONTEXT / BUDGET + 3 * OUTPUT)

"""A runner without a model: what the engine does can be checked token by token.

It keeps a fake KV cache that stores, for every slot of every block, which token was written there, and its "model"
reads the whole context back through the block table. A token written to the wrong place, read too early, lost at
preemption or shared with the wrong prefix changes the output.
"""

from collections.abc import Callable

from worker.sequence import SamplingParams
from worker.step_plan import Sampled, StepPlan, assumed_tokens

VOCAB = 50
STOP = 7


def next_token(context: list[int]) -> int:
    """The fake model: a function of the whole context."""
    state = 17
    for token in context:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB


class Launched:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def sampled(self) -> Sampled:
        return Sampled(self._ids)


class FakeRunner:
    """Computes a step when it is launched, and checks that the plan keeps the rules.

    Args:
        budget: most tokens in a step.
        with_decodes: most prompt tokens in a step in which sequences decode; 0 is no limit.
    """

    def __init__(self, num_blocks: int, block_size: int, rows: int, budget: int, with_decodes: int = 0) -> None:
        self.cache: list[int | None] = [None] * (num_blocks * block_size)
        self.block_size = block_size
        self.last: list[int | None] = [None] * rows
        self.budget = budget
        self.with_decodes = with_decodes

    def launch(self, plan: StepPlan) -> Launched:
        assert len(plan.token_ids) == sum(plan.counts) <= self.budget, "token budget exceeded"
        self._check_prompt_tokens(plan)
        assert len(set(plan.rows)) == len(plan.rows), "two sequences share a row"
        assert all(count > 0 for count in plan.counts)
        assert plan.counts == sorted(plan.counts, key=lambda count: count > 1), "single tokens must come first"
        contexts = []
        written: set[int] = set()
        singles: dict[int, int] = {}  # slots written by sequences with a single token, and their rows
        offset = 0
        for row, start, count, table in zip(plan.rows, plan.starts, plan.counts, plan.block_tables, strict=True):
            assert len(set(table)) == len(table), "a block stands twice in one table"
            for position in range(start, start + count):
                token: int | None = plan.token_ids[offset]
                if offset in plan.device_tokens:
                    token = self.last[row]
                slot = table[position // self.block_size] * self.block_size + position % self.block_size
                assert slot not in written, "two tokens of one step go to the same slot"
                written.add(slot)
                if count == 1:
                    singles[slot] = row
                self.cache[slot] = token
                offset += 1
            contexts.append((table, start + count))
        for row, (table, length) in zip(plan.rows, contexts[: len(singles)], strict=False):
            for slot in (table[i // self.block_size] * self.block_size + i % self.block_size for i in range(length)):
                assert singles.get(slot, row) == row, "a single token sees another one of its step"
        ids = []
        offsets = assumed_tokens(plan)
        drafted = {plan.samples[first]: len(drafts) for first, drafts in plan.drafts.items()}
        for place, index in enumerate(plan.samples):
            table, length = contexts[index]
            if place in offsets:
                length -= drafted[index] - len(offsets[place])
            context = [
                self.cache[table[i // self.block_size] * self.block_size + i % self.block_size] for i in range(length)
            ]
            assert None not in context, "a slot is read that was never written"
            ids.append(self.choose(context, plan.sampling[len(ids)], plan.output_indices[len(ids)]))
        for index, token in zip(plan.samples, ids, strict=True):
            self.last[plan.rows[index]] = token
        return Launched(ids)

    def choose(self, context: list[int], sampling: SamplingParams, output_index: int) -> int:
        """The next token. The fake model knows nothing of sampling."""
        return next_token(context)

    def _check_prompt_tokens(self, plan: StepPlan) -> None:
        """Sequences decode when they have run before and all but one of their tokens are computed."""
        samples, started = set(plan.samples), set(plan.started_rows)
        drafts = sum(map(len, plan.drafts.values()))
        drafted = {plan.samples[first] for first in plan.drafts}
        decodes = [
            (count == 1 or place in drafted) and place in samples and row not in started
            for place, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True))
        ]
        prompt_tokens = sum(plan.counts) - sum(decodes) - drafts
        if self.with_decodes and any(decodes):
            assert prompt_tokens <= self.with_decodes, f"{prompt_tokens} prompt tokens join decodes"

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        self.on_failure = on_failure

    def close(self) -> None:
        self.closed = True

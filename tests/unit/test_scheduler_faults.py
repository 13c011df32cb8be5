"""The check that the scheduler passes (``LoadCheck``) finds schedulers and pools that are broken, each in one place."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.doubles.scheduler_load import Load, LoadCheck, loads
from worker.block_pool import BlockPool
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.step_plan import Sampled, StepOutput, StepPlan


class LeaksABlock(Scheduler):
    def _leave(self, seq: Sequence) -> None:
        seq.blocks = seq.blocks[:-1]
        super()._leave(seq)


class DropsAToken(Scheduler):
    def settle(self, plan: StepPlan, sampled: Sampled) -> StepOutput:
        output = super().settle(plan, sampled)
        if plan.number % 7 == 0:
            del output.tokens[-1:]
        return output


class StarvesLongPrompts(Scheduler):
    def _admit(self, seq: Sequence) -> bool:
        return seq.num_prompt_tokens < 25 and super()._admit(seq)


class ForgetsThePreempted(Scheduler):
    def _preempt(self, seq: Sequence) -> None:
        super()._preempt(seq)
        self.waiting.remove(seq)


class BreaksTheBudget(Scheduler):
    def plan(self) -> StepPlan | None:
        self.max_num_batched_tokens += 1
        plan = super().plan()
        self.max_num_batched_tokens -= 1
        return plan


class BreaksTheBoundBesideDecodes(Scheduler):
    def plan(self) -> StepPlan | None:
        self.max_num_prefill_tokens_with_decodes *= 2
        plan = super().plan()
        self.max_num_prefill_tokens_with_decodes //= 2
        return plan


class IgnoresPriority(Scheduler):
    def add(self, seq: Sequence) -> None:
        seq.priority = 0
        super().add(seq)


class ReadsTheCacheAnyway(Scheduler):
    def _admit(self, seq: Sequence) -> bool:
        seq.skip_reading_prefix_cache = False
        return super()._admit(seq)


class NamesBlocksBeforeTheyAreFull(Scheduler):
    def _commit(self, seq: Sequence) -> None:
        seq.num_computed += self.block_size
        super()._commit(seq)
        seq.num_computed -= self.block_size


class TakesDraftsOnTrust(Scheduler):
    def settle(self, plan: StepPlan, sampled: Sampled) -> StepOutput:
        ids = list(sampled.ids)
        for first, drafts in plan.drafts.items():
            ids[first : first + len(drafts)] = drafts
        return super().settle(plan, Sampled(ids))


class NamesBlocksOfDrafts(Scheduler):
    """Blocks are named by what was drafted, right or wrong."""

    def _write_drafts(self, plan: StepPlan, seq: Sequence, drafts: list[int]) -> None:
        super()._write_drafts(plan, seq, drafts)
        known, computed = len(seq.tokens), seq.num_computed
        seq.tokens.extend(drafts)
        seq.num_computed += len(drafts)
        self._commit(seq)
        del seq.tokens[known:]
        seq.num_computed = computed


class DraftsBeyondTheBudget(Scheduler):
    def _plan_drafts(self, speculator, decodes, chunks):  # type: ignore[no-untyped-def]
        return super()._plan_drafts(speculator, decodes, [])


class CountsSharersOnce(BlockPool):
    def share(self, blocks: list[int]) -> None:
        super().share([block for block in blocks if self._references[block] == 0])


class SharesWithoutEnd(BlockPool):
    def release(self, blocks: list[int]) -> None:
        super().release([block for block in blocks if self._references[block] == 1])


class KeepsNamesOfEvictedBlocks(BlockPool):
    def _forget(self, block: int) -> None:
        self._names[block] = None


class EvictsInSilence(BlockPool):
    def _forget(self, block: int) -> None:
        changes, self._changes = self._changes, None
        super()._forget(block)
        self._changes = changes


# Each with what the check says of it.
FAULTS: dict[type[Scheduler] | type[BlockPool], str] = {
    LeaksABlock: "has 1 references and 0 holders",
    DropsAToken: "an output index was skipped|the output is wrong",
    StarvesLongPrompts: "a sequence starved",
    ForgetsThePreempted: "a sequence is in no list",
    BreaksTheBudget: "token budget exceeded",
    BreaksTheBoundBesideDecodes: "prompt tokens join decodes",
    IgnoresPriority: "ran before its turn",
    ReadsTheCacheAnyway: "the prefix cache was read",
    NamesBlocksBeforeTheyAreFull: "not that of its name|never written|the output is wrong",
    TakesDraftsOnTrust: "not that of its name|the output is wrong",
    NamesBlocksOfDrafts: "not that of its name",
    DraftsBeyondTheBudget: "token budget exceeded",
    CountsSharersOnce: "holders|released more often",
    SharesWithoutEnd: "holders",
    KeepsNamesOfEvictedBlocks: "a name that is not its own",
    EvictsInSilence: "names told",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault):
    parts = {"scheduler": fault} if issubclass(fault, Scheduler) else {"pool": fault}

    @settings(
        max_examples=200, database=None, deadline=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(loads)
    def search(load: Load) -> None:
        LoadCheck(load, **parts).run()

    with pytest.raises(AssertionError, match=FAULTS[fault]):
        search()

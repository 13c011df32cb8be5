"""Decides what goes into each engine step: iteration-level scheduling (Orca: Yu et al., 2022) with chunked prefill
(Sarathi: Agrawal et al., 2023) over paged blocks. Knows no tensors: a plan is data, and the runner obeys it.

    plan  -> which sequences compute which tokens in the next step, and in which blocks
    settle -> what the step sampled; sequences that ended give their blocks back

A step may be planned before the one before it is settled. A sequence whose newest token is still being sampled is
planned as if it went on; when that token turns out to end it, what the next step sampled for it is dropped.

Sequences are served by priority, then by arrival. The waiting and the running ones are kept in that order, so that the
last running one is always the one to preempt.
"""

from array import array
from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from protos.prefix import extend_chain
from worker.block_pool import BlockPool
from worker.sequence import FinishReason, SamplingParams, Sequence, SequenceStatus, TokenLogprobs, token_array

if TYPE_CHECKING:
    from worker.grammar import Automaton


class SampleRow(NamedTuple):
    """How one token is sampled: parameters, its output index, and tokens that it must not be."""

    params: SamplingParams
    output_index: int
    banned: list[int]


@dataclass(frozen=True, slots=True)
class History:
    """The known tokens of a sequence with penalties, for the counts that the device keeps for its row."""

    row: int
    prompt: "array[int]"
    output: "array[int]"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A chunk of a prompt whose log-probabilities are wanted.

    Attributes:
        sequence: index in the plan.
        first: prompt index of the first target.
        targets: consecutive prompt tokens; each is predicted by the computed token before it.
        top_count: alternatives to report.
    """

    sequence: int
    first: int
    targets: "array[int]"
    top_count: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step computed for the host, in the order of its plan's columns.

    Attributes:
        ids: of ``samples``.
        logprobs: of ``samples``; None where they were not asked for.
        prompt_logprobs: of ``prompt_logprobs``, one entry for each target.
    """

    ids: list[int]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """One engine step. The columns have one entry per sequence; those with one token come first.

    Attributes:
        number: counts from 1.
        sequences: for ``settle``; the runner does not read them.
        rows: places in the device's per-sequence buffers.
        starts: position of the first token to compute.
        counts: tokens to compute.
        block_tables: blocks of the whole context, this step's tokens included.
        token_ids: ids of all tokens to compute, one sequence after another; 0 where the id is still on the device.
        device_tokens: indices into ``token_ids`` whose id is the last one sampled for the row.
        samples: indices of the sequences that get a next token.
        sampling: how, for each of them.
        constrained: indices of the samples whose sequences follow a grammar.
        started_rows: rows that were given to a sequence in this step.
        histories: sequences with penalties that were given their row in this step.
        prompt_logprobs: indices of the sequences of which the computed tokens' log-probabilities are wanted.
        admitted: sequences that run for the first time.
    """

    number: int
    sequences: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=token_array)
    device_tokens: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    sampling: list[SampleRow] = field(default_factory=list)
    constrained: list[int] = field(default_factory=list)
    started_rows: list[int] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)
    prompt_logprobs: list[PromptRow] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """What one step came to.

    Attributes:
        number: the step.
        tokens: (sequence, output index of the first id, ids).
        logprobs: (sequence, output index of the first, one for each id) where they were asked for.
        prompt_logprobs: (sequence, prompt index of the first, consecutive ones).
        admitted: sequences that ran for the first time; their ``num_cached_tokens`` is known.
        finished: sequences that ended, their reason set and their blocks given back.
    """

    number: int
    tokens: list[tuple[Sequence, int, list[int]]] = field(default_factory=list)
    logprobs: list[tuple[Sequence, int, list[TokenLogprobs]]] = field(default_factory=list)
    prompt_logprobs: list[tuple[Sequence, int, list[TokenLogprobs]]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)


_NO_TOKENS: list[int] = []
_TURN = attrgetter("turn")

# Prompt tokens whose logits are held at once: each takes as many floats as the vocabulary has tokens.
_PROMPT_LOGITS_AT_ONCE = 64


def prompt_logit_pieces(plan: StepPlan, row: PromptRow) -> list[range]:
    """The step's tokens that predict a row's targets, by their places in the step, in pieces that fit into memory."""
    start = sum(plan.counts[: row.sequence]) + row.first - 1 - plan.starts[row.sequence]
    end = start + len(row.targets)
    return [range(at, min(at + _PROMPT_LOGITS_AT_ONCE, end)) for at in range(start, end, _PROMPT_LOGITS_AT_ONCE)]


class Scheduler:
    """Waiting and running sequences, and the blocks they hold.

    Args:
        pool: the KV cache's blocks; must hold ``max_model_len`` tokens, so that a sequence alone can always go on.
        block_size: tokens a block.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens in a step, at least ``max_num_seqs``.
        long_prefill_token_threshold: most prompt tokens of one sequence in a step; 0 is no limit.
        max_num_prefill_tokens_with_decodes: most prompt tokens in a step in which sequences decode; 0 is no limit.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
        max_num_prefill_tokens_with_decodes: int = 0,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.max_num_prefill_tokens_with_decodes = max_num_prefill_tokens_with_decodes
        self.waiting: list[Sequence] = []  # both in the order of their turns
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._arrivals = 0
        self._step = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens that must be computed before every sequence decodes."""
        return sum(max(0, seq.total_len - seq.num_computed - 1) for seq in (*self.running, *self.waiting))

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence."""
        seq.turn = (seq.priority, self._arrivals)
        self._arrivals += 1
        insort(self.waiting, seq, key=_TURN)

    def cancel(self, seq: Sequence, reason: FinishReason) -> bool:
        """Ends a sequence now. False when it had ended already."""
        if seq.finished:
            return False
        self._finish(seq, reason)
        return True

    def plan(self) -> StepPlan | None:
        """Composes the next step: decodes, then prompts in progress, then new sequences, within the token budget.

        Returns:
            The plan, or None when nothing can be computed now.
        """
        budget = self.max_num_batched_tokens
        work: dict[Sequence, int] = {}
        admitted: list[Sequence] = []
        started: list[Sequence] = []

        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self.running:
            # Everything in this loop is done once for each running sequence in each step.
            pending = seq.num_pending
            length = len(seq.tokens) + pending
            if length >= seq.last_len or (pending and seq.sampling.needs_known_tokens):
                continue  # a pending token will be its last one, or must be known first
            (decodes if length - seq.num_computed == 1 else prefills).append(seq)
        for seq in decodes:
            # A sequence may have been preempted meanwhile for one before it.
            if budget and seq.status is SequenceStatus.RUNNING and self._grow(seq):
                work[seq] = self._advance(seq, budget)
                budget -= work[seq]
        if work and self.max_num_prefill_tokens_with_decodes:
            budget = min(budget, self.max_num_prefill_tokens_with_decodes)
        for seq in prefills:
            if budget and seq.status is SequenceStatus.RUNNING:
                work[seq] = self._advance(seq, budget)
                budget -= work[seq]

        while budget and self.waiting:
            seq = self.waiting[0]
            first_run = seq.num_cached_tokens is None
            if not self._admit(seq):
                break
            if first_run:
                admitted.append(seq)
            started.append(seq)
            work[seq] = self._advance(seq, budget)
            budget -= work[seq]

        if not work:
            return None
        self._step += 1
        return self._write(work, admitted, started)

    def settle(self, plan: StepPlan, sampled: Sampled) -> StepOutput:
        """Takes in what a step computed.

        Args:
            plan: the step; steps are settled in order.
            sampled: in the order of the plan's columns.
        """
        output = StepOutput(plan.number, admitted=[seq for seq in plan.admitted if not seq.finished])
        for wanted, found in zip(plan.prompt_logprobs, sampled.prompt_logprobs, strict=True):
            seq = plan.sequences[wanted.sequence]
            if not seq.finished:
                output.prompt_logprobs.append((seq, wanted.first, found))
        for place, (index, token_id) in enumerate(zip(plan.samples, sampled.ids, strict=True)):
            seq = plan.sequences[index]
            if seq.finished:
                continue
            logprobs = sampled.logprobs[place] if sampled.logprobs else None
            if logprobs is not None:
                output.logprobs.append((seq, seq.num_output, [logprobs]))
            output.tokens.append((seq, seq.num_output, [token_id]))
            seq.tokens.append(token_id)
            seq.num_pending -= 1
            if token_id in seq.stop_token_ids:
                seq.stop_token_id = token_id
                self._finish(seq, FinishReason.STOP)
            elif seq.automaton is not None and not self._follow(seq, seq.automaton, token_id):
                pass  # it has ended
            elif len(seq.tokens) >= seq.last_len:
                self._finish(seq, FinishReason.LENGTH)
            else:
                continue
            output.finished.append(seq)
        return output

    def _follow(self, seq: Sequence, automaton: "Automaton", token_id: int) -> bool:
        """Tells the sequence's grammar its newest token. False: that ended the sequence."""
        if not automaton.accept(token_id):
            seq.error = f"{automaton.constraint.kind} cannot be followed further: {automaton.failure}"
            self._finish(seq, FinishReason.ERROR)
        elif automaton.complete:
            self._finish(seq, FinishReason.STOP)
        return not seq.finished

    def _admit(self, seq: Sequence) -> bool:
        """Moves the first waiting sequence to the running ones, with blocks for all its tokens. False: it must wait."""
        if not self._free_rows or seq.num_pending:
            return False
        self._name_blocks(seq)
        # At least one token must be computed, for its logits.
        reusable = (seq.total_len - 1) // self.block_size if seq.reads_prefix_cache else 0
        cached = self.pool.match(seq.block_names[:reusable])
        missing = self._blocks_for(seq.total_len) - len(cached)
        if missing > self.pool.num_available - self.pool.num_unreferenced(cached):
            return False
        del self.waiting[0]
        self.pool.share(cached)
        seq.blocks = cached + self.pool.allocate(missing)
        seq.num_computed = len(cached) * self.block_size
        seq.num_committed = len(cached)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed
        seq.row = self._free_rows.pop()
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=_TURN)
        return True

    def _grow(self, seq: Sequence) -> bool:
        """Makes room for the sequence's newest token, preempting those whose turn is last. False: it had to go itself.

        A sequence that is in the step already is never preempted: decodes are visited in the order of their turns, and
        prompts in progress, which come after them, have all their blocks.
        """
        missing = self._blocks_for(len(seq.tokens) + seq.num_pending) - len(seq.blocks)
        if missing <= 0:
            return True
        while missing > self.pool.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        seq.blocks += self.pool.allocate(missing)
        return True

    def _advance(self, seq: Sequence, budget: int) -> int:
        """Counts the next chunk as computed and returns its tokens.

        Blocks that it fills are known from here on, even to sequences of the same step: in every layer, a step
        writes all keys and values before it reads any.
        """
        count = min(len(seq.tokens) + seq.num_pending - seq.num_computed, budget)
        if count > 1 and self.long_prefill_token_threshold:
            count = min(count, self.long_prefill_token_threshold)
        seq.num_computed += count
        if seq.num_computed // self.block_size > seq.num_committed:
            self._commit(seq)
        return count

    def _write(self, work: dict[Sequence, int], admitted: list[Sequence], started: list[Sequence]) -> StepPlan:
        """Lays the step out in columns."""
        plan = StepPlan(self._step, admitted=admitted)
        singles = [item for item in work.items() if item[1] == 1]
        chunks = [item for item in work.items() if item[1] > 1]
        token_ids, samples, sampling = plan.token_ids, plan.samples, plan.sampling
        for place, (seq, count) in enumerate((*singles, *chunks)):
            # As in ``plan``: once for each sequence in each step.
            tokens, params = seq.tokens, seq.sampling
            end = seq.num_computed
            start = end - count
            plan.sequences.append(seq)
            plan.rows.append(seq.row)
            plan.starts.append(start)
            plan.counts.append(count)
            plan.block_tables.append(seq.blocks)
            if end > len(tokens):
                token_ids.extend(tokens[start:])
                plan.device_tokens.append(len(token_ids))
                token_ids.append(0)
            elif count == 1:
                token_ids.append(tokens[start])
            else:
                token_ids.extend(tokens[start:end])
            if end == len(tokens) + seq.num_pending:
                banned = seq.banned_tokens() if params.bans_tokens else _NO_TOKENS
                if seq.automaton is not None:
                    plan.constrained.append(len(samples))
                samples.append(place)
                sampling.append(SampleRow(params, end - seq.output_start, banned))
                seq.num_pending += 1
            if params.prompt_logprobs is not None:
                self._want_prompt_logprobs(plan, place, params.prompt_logprobs)
        for seq in started:
            plan.started_rows.append(seq.row)
            if seq.sampling.has_penalties:
                prompt, output = seq.tokens[: seq.output_start], seq.tokens[seq.output_start :]
                plan.histories.append(History(seq.row, prompt, output))
        return plan

    @staticmethod
    def _want_prompt_logprobs(plan: StepPlan, place: int, top_count: int) -> None:
        """Adds what a sequence's chunk says about prompt tokens. After a preemption, nothing is reported again."""
        seq = plan.sequences[place]
        first = max(plan.starts[place] + 1, seq.num_prompt_logprobs)
        targets = seq.tokens[first : min(seq.num_computed + 1, seq.num_prompt_tokens)]
        if targets:
            seq.num_prompt_logprobs = first + len(targets)
            plan.prompt_logprobs.append(PromptRow(place, first, targets, top_count))

    def _preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's blocks and puts it back into the queue, to be computed again when its turn comes.

        What it had committed stays in the prefix cache as long as nobody needs the blocks.
        """
        self.num_preemptions += 1
        self._leave(seq)
        seq.num_computed = 0
        seq.status = SequenceStatus.WAITING
        insort(self.waiting, seq, key=_TURN)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self._commit(seq)
            self._leave(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []
        self._free_rows.append(seq.row)
        seq.row = -1

    def _name_blocks(self, seq: Sequence) -> None:
        """Extends the sequence's chain of block names over all full blocks of known tokens."""
        named = len(seq.block_names)
        full = len(seq.tokens) // self.block_size
        if self.pool.enable_prefix_caching and full > named:
            parent = seq.block_names[-1] if named else seq.cache_root
            tokens = seq.packed_tokens(named * self.block_size, full * self.block_size)
            seq.block_names += extend_chain(parent, seq.cache_root, tokens, self.block_size)

    def _commit(self, seq: Sequence) -> None:
        """Makes the sequence's full, computed blocks known to the prefix cache."""
        if not self.pool.enable_prefix_caching:
            return
        self._name_blocks(seq)
        full = min(seq.num_computed // self.block_size, len(seq.block_names))
        for index in range(seq.num_committed, full):
            self.pool.commit(seq.blocks[index], seq.block_names[index])
        seq.num_committed = max(seq.num_committed, full)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

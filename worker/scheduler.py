"""Decides what goes into each engine step: iteration-level scheduling (Orca: Yu et al., 2022) with chunked prefill
(Sarathi: Agrawal et al., 2023) over paged blocks. Knows no tensors: a plan is data, and the runner obeys it.

    plan  -> which sequences compute which tokens in the next step, and in which blocks
    settle -> what the step sampled; sequences that ended give their blocks back

A step may be planned before the one before it is settled. A sequence whose newest token is still being sampled is
planned as if it went on; when that token turns out to end it, what the next step sampled for it is dropped.

Sequences are served by priority, then by arrival. The waiting and the running ones are kept in that order, so that the
last running one is always the one to preempt.
"""

from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING

from protos.prefix import extend_chain
from worker.block_pool import BlockPool
from worker.sequence import FinishReason, Sequence, SequenceStatus
from worker.speculation.speculator import Speculator, most_samples
from worker.step_plan import History, PromptRow, Sampled, StepOutput, StepPlan

if TYPE_CHECKING:
    from worker.grammar import Automaton


# A global is found in half the time of an enum's member.
_RUNNING, _FINISHED = SequenceStatus.RUNNING, SequenceStatus.FINISHED
_TURN = attrgetter("turn")


class Scheduler:
    """Waiting and running sequences, and the blocks they hold.

    Args:
        pool: the KV cache's blocks; must hold ``max_model_len`` tokens, so that a sequence alone can always go on.
        block_size: tokens a block.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens in a step, at least ``max_num_seqs``.
        long_prefill_token_threshold: most prompt tokens of one sequence in a step; 0 is no limit.
        max_num_prefill_tokens_with_decodes: most prompt tokens in a step in which sequences decode; 0 is no limit.
        speculator: drafts tokens for decoding sequences; None decodes one token a step.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
        max_num_prefill_tokens_with_decodes: int = 0,
        speculator: Speculator | None = None,
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
        # Prompt tokens planned since the start, those computed anew after a preemption included.
        self.num_prefill_tokens = 0
        self.speculator = speculator
        self._verified: list[tuple[int, list[int]]] = []  # for the next plan, see there
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

    @property
    def speculates(self) -> bool:
        """Whether a sequence may get drafts in the next step, once its tokens are known."""
        wants = None if self.speculator is None else self.speculator.wants
        return wants is not None and any(seq.total_len - seq.num_computed == 1 and wants(seq) for seq in self.running)

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
        """Composes the next step: decodes, then prompts in progress, then new sequences, within the token budget, and
        drafts with what is left of it.

        Returns:
            The plan, or None when nothing can be computed now.
        """
        decodes, prefills = self._plan_decodes()
        budget = self.max_num_batched_tokens - len(decodes)
        if decodes and self.max_num_prefill_tokens_with_decodes:
            budget = min(budget, self.max_num_prefill_tokens_with_decodes)
        chunks: list[tuple[Sequence, int]] = []
        for seq in prefills:
            # A sequence may have been preempted meanwhile for one that decodes.
            if budget and seq.status is _RUNNING:
                budget -= self._advance(seq, budget, chunks)

        admitted: list[Sequence] = []
        started: list[Sequence] = []
        while budget and self.waiting:
            seq = self.waiting[0]
            first_run = seq.num_cached_tokens is None
            if not self._admit(seq):
                break
            if first_run:
                admitted.append(seq)
            started.append(seq)
            budget -= self._advance(seq, budget, chunks)

        if not decodes and not chunks:
            return None
        self._step += 1
        plan = StepPlan(self._step, admitted=admitted)
        drafts = {} if self.speculator is None else self._plan_drafts(self.speculator, decodes, chunks)
        if drafts:
            decodes = [seq for seq in decodes if seq not in drafts]
        self._write_decodes(plan, decodes)
        for seq, count in chunks:
            if count == 1:
                self._write_chunk(plan, seq, count)
        for seq, guesses in drafts.items():
            self._write_drafts(plan, seq, guesses)
        for seq, count in chunks:
            if count > 1:
                self._write_chunk(plan, seq, count)
        plan.verified, self._verified = self._verified, []
        self._write_started(plan, started)
        return plan

    def settle(self, plan: StepPlan, sampled: Sampled) -> StepOutput:
        """Takes in what a step computed.

        Args:
            plan: the step; steps are settled in order.
            sampled: in the order of the plan's columns.
        """
        output = StepOutput(plan.number, admitted=[seq for seq in plan.admitted if not seq.finished])
        for wanted, rows in zip(plan.prompt_logprobs, sampled.prompt_logprobs, strict=True):
            seq = plan.sequences[wanted.sequence]
            if not seq.finished:
                output.prompt_logprobs.append((seq, wanted.first, rows))
        sequences, emitted, logprobs = plan.sequences, output.tokens, sampled.logprobs
        drafts = plan.drafts
        dropped = self._verify(plan, sampled.ids) if drafts else ()
        for place, (index, token_id) in enumerate(zip(plan.samples, sampled.ids, strict=True)):
            # Once for each running sequence in each step, as in ``_plan_decodes``: no properties, no calls.
            seq = sequences[index]
            if seq.status is _FINISHED or place in dropped:
                continue
            tokens = seq.tokens
            num_output = len(tokens) - seq.output_start
            if logprobs and (found := logprobs[place]) is not None:
                output.logprobs.append((seq, num_output, [found]))
            if drafts and emitted and emitted[-1][0] is seq:
                emitted[-1][2].append(token_id)
            else:
                emitted.append((seq, num_output, [token_id]))
            tokens.append(token_id)
            seq.num_pending -= 1
            if token_id in seq.stop_token_ids:
                seq.stop_token_id = token_id
                self._finish(seq, FinishReason.STOP)
            elif seq.automaton is not None and not self._follow(seq, seq.automaton, token_id):
                pass  # it has ended
            elif len(tokens) >= seq.last_len:
                self._finish(seq, FinishReason.LENGTH)
            else:
                continue
            output.finished.append(seq)
        for first in drafts:
            # It may have filled a block in the middle of a step, which decoding does at a step's end only.
            seq = sequences[plan.samples[first]]
            if seq.status is _RUNNING and seq.num_computed // self.block_size > seq.num_committed:
                self._commit(seq)
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

    def _plan_decodes(self) -> tuple[list[Sequence], list[Sequence]]:
        """Gives every running sequence of which one token is to be computed its place in the step.

        Returns:
            Those that got one, and those that have more to compute; both in the order of their turns.
        """
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        budget, block_size = self.max_num_batched_tokens, self.block_size
        for seq in tuple(self.running):
            # Once for each running sequence in each step: no properties, no calls.
            pending = seq.num_pending
            length = len(seq.tokens) + pending
            if length >= seq.last_len or (pending and seq.needs_known_tokens):
                continue  # a pending token will be its last one, or must be known first
            if length - seq.num_computed != 1:
                prefills.append(seq)
                continue
            if seq.status is not _RUNNING or not budget:
                continue  # preempted meanwhile for one before it, or too late
            # A block's first place needs the block, and finds the one before it filled: by the last step, not by this
            # one, for in a step no single token may be seen by another one (see ``kernels.rotary_attention``).
            if length % block_size == 1 or block_size == 1:
                if not self._grow(seq, length):
                    continue
                if seq.num_computed // block_size > seq.num_committed:
                    self._commit(seq)
            budget -= 1
            seq.num_computed = length
            decodes.append(seq)
        return decodes, prefills

    def _grow(self, seq: Sequence, length: int) -> bool:
        """Makes room for the sequence's first ``length`` tokens, preempting those whose turn is last.

        A sequence that is in the step already is never preempted: decodes are visited in the order of their turns, and
        prompts in progress, which come after them, have all their blocks.

        Returns:
            False when the sequence had to go itself.
        """
        missing = self._blocks_for(length) - len(seq.blocks)
        if missing <= 0:
            return True
        while missing > self.pool.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        seq.blocks += self.pool.allocate(missing)
        return True

    def _advance(self, seq: Sequence, budget: int, chunks: list[tuple[Sequence, int]]) -> int:
        """Adds the sequence's next chunk, counts it as computed and returns its tokens.

        Blocks that it fills are known from here on, even to sequences of the same step: in every layer, chunks' keys
        and values are written before any are read. A chunk of a single token is computed as a decoding one is, and its
        block is known from the next step on.
        """
        count = min(seq.total_len - seq.num_computed, budget)
        if count > 1 and self.long_prefill_token_threshold:
            count = min(count, self.long_prefill_token_threshold)
        seq.num_computed += count
        if count > 1 and seq.num_computed // self.block_size > seq.num_committed:
            self._commit(seq)
        chunks.append((seq, count))
        return count

    def _plan_drafts(
        self, speculator: Speculator, decodes: list[Sequence], chunks: list[tuple[Sequence, int]]
    ) -> dict[Sequence, list[int]]:
        """Gives decoding sequences drafts, within what tokens and blocks the step leaves: nobody is preempted for them.

        A block that a sequence holds for drafts that turn out wrong stays with it; it is the next one that it needs.
        """
        tokens = self.max_num_batched_tokens - len(decodes) - sum(count for _, count in chunks)
        samples = most_samples(self.max_num_seqs) - len(decodes) - len(chunks)
        planned: dict[Sequence, list[int]] = {}
        for seq, drafts in speculator.propose(decodes, min(tokens, samples)):
            length = seq.num_computed
            missing = self._blocks_for(length + len(drafts)) - len(seq.blocks)
            if missing > 0:
                seq.blocks += self.pool.allocate(min(missing, self.pool.num_available))
            if fitting := drafts[: len(seq.blocks) * self.block_size - length]:
                planned[seq] = fitting
        return planned

    def _verify(self, plan: StepPlan, ids: list[int]) -> set[int]:
        """Accepts what drafts of a step were right, and returns the samples that follow wrong ones."""
        assert self.speculator is not None
        dropped = self.speculator.verify(plan, ids)
        for first, drafts in plan.drafts.items():
            index = plan.samples[first]
            if plan.sequences[index].sampling.has_penalties:
                places = range(first, first + len(drafts) + 1)
                self._verified.append((plan.rows[index], [ids[place] for place in places if place not in dropped]))
        return dropped

    def _write_decodes(self, plan: StepPlan, decodes: list[Sequence]) -> None:
        """Lays out the sequences of which the newest token is computed and the next one sampled, column by column."""
        count = len(decodes)
        plan.sequences = decodes
        plan.rows = [seq.row for seq in decodes]
        plan.starts = [seq.num_computed - 1 for seq in decodes]
        plan.counts = [1] * count
        plan.block_tables = [seq.blocks for seq in decodes]
        plan.token_ids.extend([0 if seq.num_pending else seq.tokens[-1] for seq in decodes])
        plan.device_tokens = [place for place, seq in enumerate(decodes) if seq.num_pending]
        plan.samples = list(range(count))
        plan.sampling = [seq.sampling for seq in decodes]
        plan.output_indices = [seq.num_computed - seq.output_start for seq in decodes]
        for place, seq in enumerate(decodes):
            if seq.has_rules or seq.automaton is not None:
                self._write_rules(plan, place, place)
            seq.num_pending += 1

    def _write_drafts(self, plan: StepPlan, seq: Sequence, drafts: list[int]) -> None:
        """Lays out a sequence of which the newest token and drafts are computed, and what follows each is sampled.

        Until the drafts are verified, the sequence counts as if it had none.
        """
        place, first, length = len(plan.sequences), len(plan.samples), seq.num_computed
        plan.sequences.append(seq)
        plan.rows.append(seq.row)
        plan.starts.append(length - 1)
        plan.counts.append(1 + len(drafts))
        plan.block_tables.append(seq.blocks)
        plan.token_ids.extend((seq.tokens[-1], *drafts))
        plan.drafts[first] = drafts
        for index in range(1 + len(drafts)):
            plan.samples.append(place)
            plan.sampling.append(seq.sampling)
            plan.output_indices.append(length - seq.output_start + index)
            if seq.sampling.bans_tokens:
                plan.banned[first + index] = seq.banned_tokens(drafts[:index])
        seq.num_pending += 1

    def _write_chunk(self, plan: StepPlan, seq: Sequence, count: int) -> None:
        """Lays out a chunk of known tokens; what follows it is sampled if it is the last one."""
        place, end = len(plan.sequences), seq.num_computed
        self.num_prefill_tokens += count
        plan.sequences.append(seq)
        plan.rows.append(seq.row)
        plan.starts.append(end - count)
        plan.counts.append(count)
        plan.block_tables.append(seq.blocks)
        plan.token_ids.extend(seq.tokens[end - count : end])
        sample = None
        if end == seq.total_len:
            sample = len(plan.samples)
            plan.samples.append(place)
            plan.sampling.append(seq.sampling)
            plan.output_indices.append(end - seq.output_start)
        self._write_rules(plan, place, sample)
        if sample is not None:
            seq.num_pending += 1

    def _write_rules(self, plan: StepPlan, place: int, sample: int | None) -> None:
        """Adds what only some sequences have; before their next token counts as pending.

        Args:
            plan: the step.
            place: of the sequence.
            sample: place of its next token among the samples; None when it gets none.
        """
        seq = plan.sequences[place]
        params = seq.sampling
        if sample is not None and params.bans_tokens:
            plan.banned[sample] = seq.banned_tokens()
        if sample is not None and seq.automaton is not None:
            plan.constrained.append(sample)
        if params.prompt_logprobs is not None:
            self._want_prompt_logprobs(plan, place, params.prompt_logprobs)

    @staticmethod
    def _write_started(plan: StepPlan, started: list[Sequence]) -> None:
        """Adds what the device must know of sequences that were given a row."""
        for seq in started:
            plan.started_rows.append(seq.row)
            if seq.sampling.has_penalties:
                prompt, output = seq.tokens[: seq.output_start], seq.tokens[seq.output_start :]
                plan.histories.append(History(seq.row, prompt, output))

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
        if seq.status is _RUNNING:
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
        if full > seq.num_committed:
            filled = slice(seq.num_committed, full)
            self.pool.commit(seq.blocks[filled], seq.block_names[filled])
            seq.num_committed = full

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

"""One engine step as data: what it computes, what that gave, and what it came to. Knows no tensors."""

from array import array
from dataclasses import dataclass, field
from itertools import accumulate

from worker.sequence import SamplingParams, Sequence, TokenLogprobs, token_array


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
        samples: indices of the sequences that get a next token. A sequence with drafts stands here once for the token
            after its last known one, and once for the token after each draft.
        sampling: how, for each of them.
        output_indices: which token of its output that is, for each of them.
        banned: tokens that it must not be, by the index of the sample; for those that have some.
        constrained: indices of the samples whose sequences follow a grammar.
        started_rows: rows that were given to a sequence in this step.
        drafts: guesses at what the tokens after a sequence's last known one are, computed in this step with it, by the
            index of the first of its samples.
        verified: (row, ids) of what sequences with penalties got in an earlier step with drafts, which is not counted
            on the device yet; to be counted before the rows are given to others.
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
    sampling: list[SamplingParams] = field(default_factory=list)
    output_indices: list[int] = field(default_factory=list)
    banned: dict[int, list[int]] = field(default_factory=dict)
    constrained: list[int] = field(default_factory=list)
    started_rows: list[int] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    verified: list[tuple[int, list[int]]] = field(default_factory=list)
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


def sample_tokens(plan: StepPlan) -> list[int]:
    """For each sample, the token whose hidden state gives its logits, by its place in the step."""
    ends = list(accumulate(plan.counts))
    tokens = [ends[index] - 1 for index in plan.samples]
    for first, drafts in plan.drafts.items():
        for place, behind in enumerate(range(len(drafts), 0, -1), start=first):
            tokens[place] -= behind
    return tokens


def assumed_tokens(plan: StepPlan) -> dict[int, list[int]]:
    """The drafts before a sample, which it takes for accepted, by the index of the sample; of all steps' drafts."""
    return {first + count: drafts[:count] for first, drafts in plan.drafts.items() for count in range(len(drafts) + 1)}


# Prompt tokens whose logits are held at once: each takes as many floats as the vocabulary has tokens.
_PROMPT_LOGITS_AT_ONCE = 64


def prompt_logit_pieces(plan: StepPlan, row: PromptRow) -> list[range]:
    """The step's tokens that predict a row's targets, by their places in the step, in pieces that fit into memory."""
    start = sum(plan.counts[: row.sequence]) + row.first - 1 - plan.starts[row.sequence]
    end = start + len(row.targets)
    return [range(at, min(at + _PROMPT_LOGITS_AT_ONCE, end)) for at in range(start, end, _PROMPT_LOGITS_AT_ONCE)]

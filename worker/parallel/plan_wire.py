"""A step's plan as the leader sends it to the other ranks: packed 32-bit integers.

Only what the forward pass reads is sent: how tokens are sampled is the leader's alone. Block tables, by far the largest
column, grow by a block now and then, so that only what is new of each is sent; both ends remember the tables by row.
The two ends are the same program on the same machine; there is no version and no byte order to agree on.
"""

from array import array
from dataclasses import dataclass

from worker.sequence import token_array
from worker.step_plan import StepPlan, prompt_logit_pieces, sample_tokens

_HEADER = 8  # lengths of the columns, in front of them


@dataclass(frozen=True)
class RankPlan:
    """What a rank does in a step.

    Attributes:
        plan: with the columns that the forward pass reads.
        logit_calls: for each product with the output projection, the indices of the tokens whose logits are wanted.
    """

    plan: StepPlan
    logit_calls: list[list[int]]


def logit_calls(plan: StepPlan) -> list[list[int]]:
    """Each call of the model's ``logits`` that the leader makes for a plan, in order: every rank has to join in."""
    calls = [list(piece) for row in plan.prompt_logprobs for piece in prompt_logit_pieces(plan, row)]
    if plan.samples:
        calls.append(sample_tokens(plan))
    return calls


class PlanPacker:
    """The leader's end. Every plan must be packed, in order, and every rank must get every result."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def pack(self, plan: StepPlan) -> bytes:
        """The plan for ``PlanUnpacker.unpack``."""
        for row in plan.started_rows:
            self._tables[row] = []
        kept, added = [], array("I")
        for row, table in zip(plan.rows, plan.block_tables, strict=True):
            known = self._tables[row]
            kept.append(len(known))
            new = table[len(known) :]
            known += new
            added.extend(new)
        widths = map(len, plan.block_tables)
        calls = logit_calls(plan)
        columns = (
            *(plan.rows, plan.starts, plan.counts, kept, widths, added),
            *(plan.token_ids, plan.device_tokens, plan.samples, plan.started_rows),
            *(map(len, calls), (index for call in calls for index in call)),
        )
        lengths = (
            *(len(column) for column in (added, plan.token_ids, plan.device_tokens, plan.samples)),
            len(plan.started_rows),
            len(calls),
        )
        packed = array("I", (plan.number, len(plan.rows), *lengths))
        for column in columns:
            packed.extend(column)
        return packed.tobytes()


class PlanUnpacker:
    """A rank's end."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def unpack(self, data: bytes) -> RankPlan:
        """The next plan. Its block tables are valid until the one after it is unpacked."""
        values = array("I")
        values.frombytes(data)
        number, sequences, added_len, tokens, device_tokens, samples, started, calls = values[:_HEADER]
        place = _HEADER

        def take(count: int) -> list[int]:
            nonlocal place
            place += count
            return values[place - count : place].tolist()

        plan = StepPlan(number, rows=take(sequences), starts=take(sequences), counts=take(sequences))
        kept, widths, added = take(sequences), take(sequences), take(added_len)
        start = 0
        for row, known, width in zip(plan.rows, kept, widths, strict=True):
            table = self._tables.setdefault(row, [])
            table[known:] = added[start : start + width - known]
            start += width - known
            plan.block_tables.append(table)
        plan.token_ids = token_array()
        plan.token_ids.extend(take(tokens))
        plan.device_tokens, plan.samples, plan.started_rows = take(device_tokens), take(samples), take(started)
        wanted = [take(count) for count in take(calls)]
        return RankPlan(plan, wanted)

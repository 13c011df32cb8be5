"""Turns a step's plan, which is lists, into the tensors that the model reads: the only place that does."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.attention import AttentionBatch, HostLayout
from kernels.logit_adjustments import Entries, LogitAdjustments, Penalties
from kernels.sampling import SamplingBatch, random_key
from kernels.token_bitmask import TokenBitmask
from worker.sequence import SamplingParams
from worker.step_plan import StepPlan, sample_tokens


@dataclass(frozen=True)
class StepInput:
    """Tensors of one step, on the model's device.

    Attributes:
        token_ids, positions: [tokens] int64.
        attention: where keys go and what each query sees.
        sample_tokens: [samples] int64: the tokens whose hidden states give logits.
        sample_rows: [samples] int64: the rows that keep the sampled ids.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    sample_tokens: torch.Tensor
    sample_rows: torch.Tensor


class InputBuilder(Protocol):
    """Turns plans into what the model reads."""

    last_tokens: torch.Tensor  # at least [rows] int64: the id last sampled for each row, the next step's input

    def build(self, plan: StepPlan) -> StepInput:
        """The tensors of a step."""


class HostInputBuilder:
    """Builds what the torch reference reads.

    Args:
        max_num_seqs: rows.
        block_size: tokens a block.
        key_tile: to what multiple of tokens attention pads a sequence's keys.
        device: where the model is.
    """

    def __init__(self, max_num_seqs: int, block_size: int, key_tile: int, device: torch.device) -> None:
        self.block_size = block_size
        self.key_tile = key_tile
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def build(self, plan: StepPlan) -> StepInput:
        """The tensors of a step."""
        return _host_step_input(plan, self.last_tokens, self.block_size, self.key_tile)


def _host_step_input(plan: StepPlan, last_tokens: torch.Tensor, block_size: int, key_tile: int) -> StepInput:
    device = last_tokens.device

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    token_ids = tensor(plan.token_ids.tolist())
    if plan.device_tokens:
        token_rows = [row for row, count in zip(plan.rows, plan.counts, strict=True) for _ in range(count)]
        where = tensor(plan.device_tokens)
        token_ids[where] = last_tokens[tensor([token_rows[index] for index in plan.device_tokens])]

    counts = tensor(plan.counts)
    ends = counts.cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(len(plan.counts), device=device), counts)
    within = torch.arange(len(plan.token_ids), device=device) - (ends - counts)[sequence]
    positions = tensor(plan.starts)[sequence] + within

    width = max(len(table) for table in plan.block_tables)
    block_tables = tensor([block for table in plan.block_tables for block in table + [0] * (width - len(table))])
    block_tables = block_tables.view(-1, width)
    slots = block_tables[sequence, positions // block_size] * block_size + positions % block_size
    attention = HostLayout(
        slot_mapping=slots,
        block_tables=block_tables,
        query_lens=tuple(plan.counts),
        context_lens=tuple(start + count for start, count in zip(plan.starts, plan.counts, strict=True)),
        block_size=block_size,
        key_tile=key_tile,
    )
    return StepInput(
        token_ids=token_ids,
        positions=positions,
        attention=attention,
        sample_tokens=tensor(sample_tokens(plan)),
        sample_rows=tensor([plan.rows[index] for index in plan.samples]),
    )


def build_sampling(sampling: list[SamplingParams], output_indices: list[int], device: torch.device) -> SamplingBatch:
    """The rows' parameters as tensors, leaving out those that no row uses.

    Args:
        sampling: how each row is sampled.
        output_indices: which token of its output each row is.
        device: where the logits are.
    """
    if all(params.temperature == 0 for params in sampling):
        return SamplingBatch()
    keys = [random_key(params.seed, index) for params, index in zip(sampling, output_indices, strict=True)]
    # A greedy row's filters change nothing.
    active = [params if params.temperature else SamplingParams(temperature=0) for params in sampling]
    floats = partial(torch.tensor, dtype=torch.float32, device=device)
    integers = partial(torch.tensor, dtype=torch.int64, device=device)
    return SamplingBatch(
        temperature=floats([params.temperature for params in active]),
        top_k=integers([params.top_k for params in active]) if any(params.top_k for params in active) else None,
        top_p=floats([params.top_p for params in active]) if any(params.top_p < 1 for params in active) else None,
        min_p=floats([params.min_p for params in active]) if any(params.min_p for params in active) else None,
        key_low=integers([low for low, _ in keys]),
        key_high=integers([high for _, high in keys]),
    )


def build_adjustments(
    sampling: list[SamplingParams],
    banned_tokens: dict[int, list[int]],
    penalties: Penalties | None,
    grammar: TokenBitmask | None,
    device: torch.device,
) -> LogitAdjustments | None:
    """The rows' rules for single logits as tensors; None when no row has any.

    Args:
        sampling: how each row is sampled.
        banned_tokens: what it must not be, by row.
        penalties: of those rows that have them.
        grammar: the same.
        device: where the logits are.
    """
    bias = [(place, token, value) for place, params in enumerate(sampling) for token, value in params.logit_bias]
    allowed = [(place, token) for place, params in enumerate(sampling) for token in params.allowed_token_ids]
    banned = [(place, token) for place, tokens in banned_tokens.items() for token in tokens]
    if not (bias or allowed or banned or penalties or grammar):
        return None

    def entries(pairs: list[tuple[int, int]]) -> Entries | None:
        if not pairs:
            return None
        columns = torch.tensor(pairs, dtype=torch.int64, device=device).T
        return Entries(columns[0], columns[1])

    biased = entries([(place, token) for place, token, _ in bias])
    if biased is not None:
        values = torch.tensor([value for _, _, value in bias], dtype=torch.float32, device=device)
        biased = replace(biased, values=values)
    return LogitAdjustments(biased, entries(allowed), entries(banned), grammar, penalties)


def build_bitmask(places: list[int], bitmask: NDArray[np.int32], device: torch.device) -> TokenBitmask:
    """Grammars' masks as tensors, in one copy to the device.

    Args:
        places: the samples that have one.
        bitmask: [places, words], as ``StepMasks`` has it.
        device: where the logits are.
    """
    bits = torch.from_numpy(bitmask)
    if device.type == "cuda":
        bits = bits.pin_memory().to(device, non_blocking=True)
    return TokenBitmask(torch.tensor(places, dtype=torch.int64, device=device), bits)

"""A step's plan on its way to a GPU: one array of integers, one copy, and small kernels that unpack it there.

Block tables stay on the GPU and grow by what is new in each step. Nothing here waits for the GPU.
"""

import numpy as np
import torch

from kernels.gpu.attention_layout import PREFILL_TILE, PREFIX_MEMBERS, GpuLayout, PrefixLayout
from kernels.gpu.step_columns import token_columns, update_tables
from worker.gpu_columns import (
    Column,
    MixedSize,
    aligned,
    decode_size,
    send_columns,
    step_columns,
    tile_starts,
    token_ids,
)
from worker.shared_prefixes import MIN_MEMBERS, PrefixGroup, PrefixGrouping
from worker.step_input import StepInput
from worker.step_plan import StepPlan, sample_tokens

# Sequences with several tokens in a captured step, beside those that fill whole tiles of queries.
_MOST_CHUNKS = 64


class GpuInputBuilder:
    """Builds steps' tensors, and owns those that stay between steps.

    Args:
        max_num_seqs: rows.
        max_blocks: of one sequence.
        block_size: tokens a block.
        device: a GPU.
        grouping: finds decoding sequences that share a prefix; None: each reads its keys itself.
        prefill_parts: into how many parts the keys that a step's few queries see are divided, about: as many as fill
            the GPU.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        grouping: PrefixGrouping | None = None,
        prefill_parts: int = 1,
    ) -> None:
        self.block_size = block_size
        self.grouping = grouping
        self.device = device
        self._prefill_parts = prefill_parts
        # One row more, for places of a captured step that are not in use.
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._tables = torch.zeros(max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device)
        self._known = [0] * max_num_seqs  # blocks in each row of the tables
        self._spare_row = max_num_seqs

    def build(self, plan: StepPlan) -> StepInput:
        """The tensors of any step."""
        step = step_columns(plan, self._prefill_parts)
        places, blocks = self._new_blocks(plan)
        groups = self.find_groups(plan)
        prefixes = self._prefix_columns(groups, step.contexts[: step.num_decodes]) if groups else []
        columns: list[Column] = [
            *(step.ids, step.token_rows, step.positions, step.rows, step.contexts, step.query_starts),
            *(step.decode_tiles, step.prefill_tiles.ravel(), places, blocks),
            *(sample_tokens(plan), step.rows[plan.samples]),
            *prefixes,
        ]
        ids, token_rows, position, row, context, starts, decode_tiles, prefill, place, block, *rest = send_columns(
            columns, self.device
        )
        update_tables(place, block, self._tables)
        token_ids, positions, slots, _ = token_columns(
            ids, token_rows, position, self.last_tokens, self._tables, self.block_size
        )
        layout = GpuLayout(
            slot_mapping=slots,
            block_tables=self._tables,
            rows=row,
            context_lens=context,
            decode_tiles=decode_tiles,
            num_decodes=step.num_decodes,
            prefill_start=step.num_decodes,
            query_starts=starts,
            prefill_tiles=prefill.view(4, -1),
            divided=2 * self._prefill_parts if step.divided else 0,
            prefixes=self._prefix_layout(*rest[2:]) if groups else None,
        )
        sampled_tokens, sample_rows = (column.long() for column in rest[:2])
        return StepInput(token_ids, positions, layout, sampled_tokens, sample_rows)

    def mixed_size(self, tokens: int) -> MixedSize:
        """What a captured step of so many tokens has room for, of whatever sequences."""
        sequences = min(tokens, self._spare_row)
        prefixes = 0
        if self.grouping is not None and sequences >= MIN_MEMBERS:
            prefixes = self.grouping.size(sequences)
        full = tokens // PREFILL_TILE
        divided = 2 * self._prefill_parts if full < self._prefill_parts else 0
        return MixedSize(tokens, sequences, max(full + min(sequences, _MOST_CHUNKS), divided), divided, prefixes)

    def mixed_columns(self, plan: StepPlan, size: MixedSize) -> tuple[np.ndarray, torch.Tensor, torch.Tensor] | None:
        """The step as ``mixed_input`` reads it, once the tables are up to date, which this sees to.

        Returns:
            [size.integers] int32; the places of the tokens after which to sample, and the rows of what is sampled, both
            [samples] int64 on the GPU; None when the step's prompts are more than there is room for.
        """
        step = step_columns(plan, self._prefill_parts if size.divided else 0)
        if step.prefill_tiles.shape[1] > size.tiles:
            return None
        groups = self.find_groups(plan)
        sent = send_columns([*self._new_blocks(plan), sample_tokens(plan), step.rows[plan.samples]], self.device)
        update_tables(sent[0], sent[1], self._tables)
        tiles = np.full((4, size.tiles), -1, np.int32)
        tiles[:, : step.prefill_tiles.shape[1]] = step.prefill_tiles
        columns: list[tuple[Column, int]] = [  # and what stands in places not in use
            *((step.ids, 0), (step.token_rows, self._spare_row), (step.positions, -1)),
            *((step.rows, self._spare_row), (step.contexts, 0)),
            *((step.query_starts, int(step.query_starts[-1])), (step.decode_tiles, int(step.decode_tiles[-1]))),
            (tiles.ravel(), -1),
        ]
        if size.prefixes:
            decoding = np.zeros(size.sequences, np.int32)
            decoding[: step.num_decodes] = step.contexts[: step.num_decodes]
            columns += [(column, 0) for column in self._prefix_columns(groups, decoding)]
        packed = np.empty(size.integers, np.int32)
        for (start, length), (column, filling) in zip(size.places, columns, strict=True):
            packed[start : start + len(column)] = column
            packed[start + len(column) : start + length] = filling
        return packed, sent[2].long(), sent[3].long()

    def mixed_input(self, packed: torch.Tensor, size: MixedSize) -> StepInput:
        """The tensors of a step of any kind, without what to sample.

        Args:
            packed: [size.integers] int32, on the GPU.
        """
        columns = [packed[start : start + length] for start, length in size.places]
        ids, token_rows, position, rows, contexts, starts, decode_tiles, prefill, *prefixes = columns
        token_ids, positions, slots, _ = token_columns(
            ids, token_rows, position, self.last_tokens, self._tables, self.block_size
        )
        layout = GpuLayout(
            slot_mapping=slots,
            block_tables=self._tables,
            rows=rows,
            context_lens=contexts,
            decode_tiles=decode_tiles,
            num_decodes=size.sequences,
            prefill_start=0,
            query_starts=starts,
            prefill_tiles=prefill.view(4, -1),
            divided=size.divided,
            prefixes=self._prefix_layout(*prefixes) if prefixes else None,
        )
        nothing = token_ids.new_empty(0)
        return StepInput(token_ids, positions, layout, nothing, nothing)

    def find_groups(self, plan: StepPlan) -> list[PrefixGroup]:
        """The step's sequences that share prefixes, to be read once for each group. To be called for every step."""
        return [] if self.grouping is None else self.grouping.find(plan)

    def decode_size(self, places: int, prefixes: bool = False) -> int:
        """Integers of a packed step of single tokens, with what there is to say of shared prefixes, or without."""
        plain = decode_size(places)
        if not prefixes:
            return plain
        assert self.grouping is not None
        return aligned(plain) + aligned(self.grouping.size(places)) + places + 1

    def decode_columns(self, plan: StepPlan, places: int, groups: list[PrefixGroup] | None = None) -> np.ndarray:
        """The step, of single tokens only, as ``decode_input`` reads it: ``decode_size`` integers.

        ``groups``: see ``find_groups``; None leaves out all there is to say of them.
        """
        count = len(plan.rows)
        packed = np.zeros(self.decode_size(places, groups is not None), np.int32)
        ids, rows, positions, contexts, place, block = packed[: 6 * places].reshape(6, places)
        ids[:count], ids[count:] = token_ids(plan), 0
        rows[:count], rows[count:] = plan.rows, self._spare_row
        positions[:count], positions[count:] = plan.starts, -1
        np.add(positions, 1, out=contexts)
        new_places, new_blocks = self._new_blocks(plan)
        if len(new_places) > places:  # sequences that begin with all but one token cached
            sent_places, sent_blocks = send_columns([new_places, new_blocks], self.device)
            update_tables(sent_places, sent_blocks, self._tables)
            new_places, new_blocks = [], []
        place[: len(new_places)], place[len(new_places) :] = new_places, -1
        block[: len(new_blocks)] = new_blocks
        plain = decode_size(places)
        packed[6 * places : plain] = tile_starts(contexts)
        if groups is not None:
            prefixes, own_tiles = self._prefix_columns(groups, contexts)
            packed[aligned(plain) :][: len(prefixes)] = prefixes
            packed[-places - 1 :] = own_tiles
        return packed

    def decode_input(self, packed: torch.Tensor, places: int, prefixes: bool = False) -> StepInput:
        """The tensors of a step of single tokens.

        Args:
            packed: [decode_size(places, prefixes)] int32, on the GPU.
            places: sequences, those not in use included.
            prefixes: whether it was packed with groups.
        """
        plain = decode_size(places)
        shared = None
        if prefixes:
            assert self.grouping is not None
            begin = aligned(plain)
            shared = self._prefix_layout(packed[begin : begin + self.grouping.size(places)], packed[-places - 1 :])
        ids, rows, position, context, place, block = packed[: 6 * places].view(6, places)
        update_tables(place, block, self._tables)
        token_ids, positions, slots, sample_rows = token_columns(
            ids, rows, position, self.last_tokens, self._tables, self.block_size
        )
        each = torch.arange(places + 1, dtype=torch.int32, device=self.device)
        layout = GpuLayout(
            slot_mapping=slots,
            block_tables=self._tables,
            rows=rows,
            context_lens=context,
            decode_tiles=packed[6 * places : plain],
            num_decodes=places,
            prefill_start=places,
            query_starts=each,
            prefill_tiles=packed.new_empty((4, 0)),
            divided=0,
            prefixes=shared,
        )
        return StepInput(token_ids, positions, layout, each[:-1].long(), sample_rows)

    def _prefix_columns(self, groups: list[PrefixGroup], contexts: np.ndarray) -> list[Column]:
        """What ``_prefix_layout`` reads, of all decoding places."""
        assert self.grouping is not None
        columns = self.grouping.columns(groups, len(contexts))
        return [columns, tile_starts(contexts - columns[: len(contexts)])]

    def _prefix_layout(self, columns: torch.Tensor, own_tiles: torch.Tensor) -> PrefixLayout:
        assert self.grouping is not None
        places = len(own_tiles) - 1
        tiles, parts = self.grouping.most(places)
        sequences, members, parts_ = columns.split((3 * places, PREFIX_MEMBERS * tiles, 3 * parts))
        return PrefixLayout(sequences.view(3, -1), members.view(tiles, -1), parts_.view(3, -1), own_tiles)

    def _new_blocks(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Places in the flattened tables, and blocks, of what the GPU does not know yet."""
        for row in plan.started_rows:
            self._known[row] = 0
        places: list[int] = []
        blocks: list[int] = []
        width = self._tables.shape[1]
        for row, table in zip(plan.rows, plan.block_tables, strict=True):
            known = self._known[row]
            if len(table) > known:
                places.extend(range(row * width + known, row * width + len(table)))
                blocks += table[known:]
                self._known[row] = len(table)
        return places, blocks

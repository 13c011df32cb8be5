"""A step's plan on its way to a GPU: one array of integers, one copy, and small kernels that unpack it there.

Block tables stay on the GPU and grow by what is new in each step. Nothing here waits for the GPU.
"""

from itertools import pairwise

import numpy as np
import torch

from kernels.gpu.attention_layout import DECODE_TILE, PREFILL_TILE, PREFIX_MEMBERS, GpuLayout, PrefixLayout
from kernels.gpu.step_columns import token_columns, update_tables
from worker.shared_prefixes import PrefixGroup, PrefixGrouping
from worker.step_input import StepInput
from worker.step_plan import StepPlan, sample_tokens

Column = np.ndarray | list[int]


class GpuInputBuilder:
    """Builds steps' tensors, and owns those that stay between steps.

    Args:
        max_num_seqs: rows.
        max_blocks: of one sequence.
        block_size: tokens a block.
        device: a GPU.
        grouping: finds decoding sequences that share a prefix; None: each reads its keys itself.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        grouping: PrefixGrouping | None = None,
    ) -> None:
        self.block_size = block_size
        self.grouping = grouping
        self.device = device
        # One row more, for places of a captured step that are not in use.
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._tables = torch.zeros(max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device)
        self._known = [0] * max_num_seqs  # blocks in each row of the tables
        self._spare_row = max_num_seqs

    def build(self, plan: StepPlan) -> StepInput:
        """The tensors of any step."""
        counts, starts = np.array(plan.counts, np.int32), np.array(plan.starts, np.int32)
        rows = np.array(plan.rows, np.int32)
        query_starts = np.concatenate(([0], counts.cumsum(dtype=np.int32)))
        positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], counts)
        num_decodes = int(np.count_nonzero(counts == 1))
        contexts = starts + counts
        tiles = [
            (place, begin)
            for place in range(num_decodes, len(counts))
            for begin in range(0, plan.counts[place], PREFILL_TILE)
        ]
        prefill_tiles = np.array(tiles, np.int32).reshape(-1, 2).T
        places, blocks = self._new_blocks(plan)
        groups = self.find_groups(plan)
        prefixes = self._prefix_columns(groups, contexts[:num_decodes]) if groups else []
        columns: list[Column] = [
            *(self._token_ids(plan), np.repeat(rows, counts), positions, rows, contexts, query_starts),
            *(_tile_starts(contexts[:num_decodes]), prefill_tiles.ravel(), places, blocks),
            *(sample_tokens(plan), rows[plan.samples]),
            *prefixes,
        ]
        ids, token_rows, position, row, context, starts_, decode_tiles, prefill, place, block, *rest = _send(
            columns, self.device
        )
        update_tables(place, block, self._tables)
        token_ids, positions_, slots, _ = token_columns(
            ids, token_rows, position, self.last_tokens, self._tables, self.block_size
        )
        layout = GpuLayout(
            slot_mapping=slots,
            block_tables=self._tables,
            rows=row,
            context_lens=context,
            decode_tiles=decode_tiles,
            num_decodes=num_decodes,
            query_starts=starts_,
            prefill_tiles=prefill.view(2, -1),
            prefixes=self._prefix_layout(*rest[2:]) if groups else None,
        )
        sampled_tokens, sample_rows = (column.long() for column in rest[:2])
        return StepInput(token_ids, positions_, layout, sampled_tokens, sample_rows)

    def find_groups(self, plan: StepPlan) -> list[PrefixGroup]:
        """The step's sequences that share prefixes, to be read once for each group. To be called for every step."""
        return [] if self.grouping is None else self.grouping.find(plan)

    def decode_size(self, places: int, prefixes: bool = False) -> int:
        """Integers of a packed step of single tokens, with what there is to say of shared prefixes, or without."""
        plain = decode_size(places)
        if not prefixes:
            return plain
        assert self.grouping is not None
        return _aligned(plain) + _aligned(self.grouping.size(places)) + places + 1

    def decode_columns(self, plan: StepPlan, places: int, groups: list[PrefixGroup] | None = None) -> np.ndarray:
        """The step, of single tokens only, as ``decode_input`` reads it: ``decode_size`` integers.

        ``groups``: see ``find_groups``; None leaves out all there is to say of them.
        """
        count = len(plan.rows)
        packed = np.zeros(self.decode_size(places, groups is not None), np.int32)
        ids, rows, positions, contexts, place, block = packed[: 6 * places].reshape(6, places)
        ids[:count], ids[count:] = self._token_ids(plan), 0
        rows[:count], rows[count:] = plan.rows, self._spare_row
        positions[:count], positions[count:] = plan.starts, -1
        np.add(positions, 1, out=contexts)
        new_places, new_blocks = self._new_blocks(plan)
        if len(new_places) > places:  # sequences that begin with all but one token cached
            sent_places, sent_blocks = _send([new_places, new_blocks], self.device)
            update_tables(sent_places, sent_blocks, self._tables)
            new_places, new_blocks = [], []
        place[: len(new_places)], place[len(new_places) :] = new_places, -1
        block[: len(new_blocks)] = new_blocks
        plain = decode_size(places)
        packed[6 * places : plain] = _tile_starts(contexts)
        if groups is not None:
            prefixes, own_tiles = self._prefix_columns(groups, contexts)
            packed[_aligned(plain) :][: len(prefixes)] = prefixes
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
            begin = _aligned(plain)
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
            query_starts=each,
            prefill_tiles=packed.new_empty((2, 0)),
            prefixes=shared,
        )
        return StepInput(token_ids, positions, layout, each[:-1].long(), sample_rows)

    def _prefix_columns(self, groups: list[PrefixGroup], contexts: np.ndarray) -> list[Column]:
        """What ``_prefix_layout`` reads, of all decoding places."""
        assert self.grouping is not None
        columns = self.grouping.columns(groups, len(contexts))
        return [columns, _tile_starts(contexts - columns[: len(contexts)])]

    def _prefix_layout(self, columns: torch.Tensor, own_tiles: torch.Tensor) -> PrefixLayout:
        assert self.grouping is not None
        places = len(own_tiles) - 1
        tiles, parts = self.grouping.most(places)
        sequences, members, parts_ = columns.split((3 * places, PREFIX_MEMBERS * tiles, 3 * parts))
        return PrefixLayout(sequences.view(3, -1), members.view(tiles, -1), parts_.view(3, -1), own_tiles)

    @staticmethod
    def _token_ids(plan: StepPlan) -> np.ndarray:
        """[tokens] int32; -1 where the id is on the GPU only."""
        ids = np.frombuffer(plan.token_ids, np.uint32).astype(np.int32)
        ids[plan.device_tokens] = -1
        return ids

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


def decode_size(places: int) -> int:
    """Integers of a packed step of single tokens, without shared prefixes."""
    return 7 * places + 1


def _aligned(count: int) -> int:
    """So many integers, and the rest up to a multiple of 16 bytes."""
    return -(-count // 4) * 4


def _tile_starts(contexts: np.ndarray) -> np.ndarray:
    """[n + 1] int32: key tiles before each sequence."""
    starts = np.zeros(len(contexts) + 1, np.int32)
    np.cumsum((contexts + (DECODE_TILE - 1)) // DECODE_TILE, out=starts[1:])
    return starts


def send(packed: np.ndarray, to: torch.Tensor) -> None:
    """Copies integers to the GPU, from memory that stays untouched until the copy is done."""
    host = torch.empty(len(packed), dtype=torch.int32, pin_memory=to.is_cuda)
    host.numpy()[:] = packed
    to.copy_(host, non_blocking=True)


def _send(columns: list[Column], device: torch.device) -> list[torch.Tensor]:
    """The columns on the GPU, sent as one. Each begins at a multiple of 16 bytes."""
    starts = np.cumsum([0, *(_aligned(len(column)) for column in columns)])
    packed = np.zeros(starts[-1], np.int32)
    for start, column in zip(starts, columns, strict=False):
        packed[start : start + len(column)] = column
    held = torch.empty(len(packed), dtype=torch.int32, device=device)
    send(packed, held)
    return [held[start : start + len(column)] for (start, _), column in zip(pairwise(starts), columns, strict=True)]

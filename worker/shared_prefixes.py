"""Which decoding sequences of a step begin with the same blocks, so that attention reads those once for all of them.

The prefix cache gives equal prefixes equal blocks; nothing here compares tokens. Knows no tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

import numpy as np

from kernels.gpu.attention_layout import DECODE_TILE, PREFIX_MEMBERS
from worker.step_plan import StepPlan

# Of keys and values in a layer, which a group must save reading: it costs another kernel and the merge of what that
# leaves, 40 to 70 us on an H200, which reads as much in 60 us (``benchmarks/shared_prefix.py``).
MIN_BYTES_SAVED = 256 << 20
MIN_MEMBERS = 4
# How often a group is looked at for smaller ones with longer prefixes, say all that share a system prompt, then those
# that share a document too.
_LEVELS = 3
# Tiles of keys in a part, below which more parts only mean more to merge.
_MIN_PART_TILES = 4


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Decoding sequences with the same keys at their beginning.

    Attributes:
        members: their places in the step, ascending.
        keys: how many, a multiple of ``DECODE_TILE``, all before each member's newest token.
    """

    members: list[int]
    keys: int

    @property
    def tokens_saved(self) -> int:
        """Tokens whose keys and values are not read again."""
        return (len(self.members) - 1) * self.keys


class PrefixGrouping:
    """Finds the groups of steps, and keeps them while the same sequences decode.

    Args:
        block_size: tokens a block.
        wanted_parts: into how many parts the shared keys are cut, about: as many as fill the GPU.
        min_tokens_saved: whose keys and values a group must save reading.
    """

    def __init__(self, block_size: int, wanted_parts: int, min_tokens_saved: int) -> None:
        self._block_size = block_size
        self._wanted_parts = wanted_parts
        self._min_tokens_saved = min_tokens_saved
        self._rows: list[int] = []
        self._groups: list[PrefixGroup] = []
        self._columns: tuple[list[PrefixGroup], int, np.ndarray] | None = None  # the last ones, and of what

    def find(self, plan: StepPlan) -> list[PrefixGroup]:
        """The step's groups; a sequence is in one at most. To be called for every step."""
        rows = plan.rows if len(plan.token_ids) == len(plan.rows) else plan.rows[: plan.counts.count(1)]
        # A sequence's full blocks never change while it has its row.
        if plan.started_rows or rows != self._rows:
            self._rows = rows
            self._groups = []
            first_blocks = {table[0] for table in plan.block_tables[: len(rows)]}
            if len(rows) - len(first_blocks) >= MIN_MEMBERS - 1:
                for alike in _by_block(range(len(rows)), plan.block_tables, 0):
                    self._groups += self._divide(alike, plan, _LEVELS)
        return self._groups

    def _divide(self, members: list[int], plan: StepPlan, levels: int) -> list[PrefixGroup]:
        """Of sequences that begin alike, the groups that save the most: all as one, or those that part later."""
        # What the first and the last one of a sorted list have in common, all have.
        tables = [plan.block_tables[place] for place in members]
        low, high = min(tables), max(tables)
        common = sum(1 for _ in takewhile(bool, map(eq, low, high)))
        known = min(plan.starts[place] for place in members)
        whole = PrefixGroup(members, min(common * self._block_size, known) // DECODE_TILE * DECODE_TILE)
        groups = [whole] if whole.tokens_saved >= self._min_tokens_saved else []
        if levels > 1:
            parts: list[PrefixGroup] = []
            for alike in _by_block(members, plan.block_tables, common):
                parts += self._divide(alike, plan, levels - 1)
            if sum(group.tokens_saved for group in parts) > sum(group.tokens_saved for group in groups):
                groups = parts
        return groups

    def most(self, places: int) -> tuple[int, int]:
        """(tiles, parts) of so many decoding sequences, whatever their groups."""
        tiles = places // MIN_MEMBERS  # of 17 members there are two tiles, of 4 there is one
        return tiles, tiles + self._wanted_parts

    def size(self, places: int) -> int:
        """Integers of ``columns``."""
        tiles, parts = self.most(places)
        return 3 * places + PREFIX_MEMBERS * tiles + 3 * parts

    def columns(self, groups: list[PrefixGroup], places: int) -> np.ndarray:
        """[size(places)] int32: ``sequences``, ``members`` and ``parts`` of ``PrefixLayout``, one after another.

        Args:
            groups: of the step.
            places: its decoding sequences, those not in use included.
        """
        if self._columns is None or self._columns[0] is not groups or self._columns[1] != places:
            self._columns = groups, places, self._deal(groups, places)
        return self._columns[2]

    def _deal(self, groups: list[PrefixGroup], places: int) -> np.ndarray:
        """Cuts each tile's keys into parts, so that all parts are about as long."""
        columns = np.zeros(self.size(places), np.int32)
        most_tiles, _ = self.most(places)
        sequences, members, parts = np.split(columns, (3 * places, 3 * places + PREFIX_MEMBERS * most_tiles))
        sequences, members, parts = (
            sequences.reshape(3, places),
            members.reshape(-1, PREFIX_MEMBERS),
            parts.reshape(3, -1),
        )
        members[:] = -1
        tiles = [
            (group.members[first : first + PREFIX_MEMBERS], group.keys // DECODE_TILE)
            for group in groups
            for first in range(0, len(group.members), PREFIX_MEMBERS)
        ]
        total = sum(keys for _, keys in tiles)
        used = 0
        for tile, (held, keys) in enumerate(tiles):
            count = max(min(keys * self._wanted_parts // total, keys // _MIN_PART_TILES), 1)
            bounds = np.arange(count + 1) * keys // count * DECODE_TILE
            members[tile, : len(held)] = held
            sequences[0, held], sequences[1, held] = keys * DECODE_TILE, count
            sequences[2, held] = used * PREFIX_MEMBERS + np.arange(len(held))
            parts[:, used : used + count] = np.stack((np.full(count, tile), bounds[:-1], bounds[1:]))
            used += count
        return columns


def _by_block(members: "list[int] | range", tables: list[list[int]], index: int) -> Iterator[list[int]]:
    """The members whose block at ``index`` is the same, where they are enough for a group."""
    found: dict[int, list[int]] = {}
    for place in members:
        table = tables[place]
        if index < len(table):
            found.setdefault(table[index], []).append(place)
    return (alike for alike in found.values() if len(alike) >= MIN_MEMBERS)

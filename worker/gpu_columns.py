"""A step as arrays of integers on the host: how they are packed, and sent to a GPU as one."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from kernels.gpu.attention_layout import DECODE_TILE, PREFILL_TILE
from worker.step_plan import StepPlan

Column = np.ndarray | list[int]

_MIN_KEYS = 512  # in a part of those of a tile of queries: fewer are read in the time that it takes to merge them


@dataclass(frozen=True)
class StepColumns:
    """A step's integers on the host: token ids, rows and positions of each token, and what ``GpuLayout`` has."""

    ids: np.ndarray
    token_rows: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    contexts: np.ndarray
    query_starts: np.ndarray
    decode_tiles: np.ndarray
    prefill_tiles: np.ndarray
    num_decodes: int
    divided: bool  # whether a tile's keys are divided among parts


@dataclass(frozen=True)
class MixedSize:
    """Room in a captured step.

    Attributes:
        tokens, sequences: of all.
        tiles: of queries of sequences with several tokens, each part of their keys counted.
        divided: see ``GpuLayout``.
        prefixes: integers that tell of shared prefixes; 0: there is no word of them.
    """

    tokens: int
    sequences: int
    tiles: int
    divided: int
    prefixes: int

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Where each column is in the packed step, and its length. Each begins at a multiple of 16 bytes."""
        lengths = [self.tokens] * 3 + [self.sequences] * 2 + [self.sequences + 1] * 2 + [4 * self.tiles]
        if self.prefixes:
            lengths += [self.prefixes, self.sequences + 1]
        starts = np.cumsum([0, *map(aligned, lengths)]).tolist()
        return list(zip(starts[:-1], lengths, strict=True))

    @property
    def integers(self) -> int:
        """Of the packed step."""
        start, length = self.places[-1]
        return start + length


def step_columns(plan: StepPlan, wanted_parts: int) -> StepColumns:
    """The columns of any step. Where it has fewer tiles of queries than ``wanted_parts``, keys are divided among about
    as many parts."""
    counts, starts = np.array(plan.counts, np.int32), np.array(plan.starts, np.int32)
    rows = np.array(plan.rows, np.int32)
    query_starts = np.concatenate((np.zeros(1, np.int32), counts.cumsum(dtype=np.int32)))
    num_decodes = int(np.count_nonzero(counts == 1))
    tiles = [
        (place, begin)
        for place in range(num_decodes, len(counts))
        for begin in range(0, plan.counts[place], PREFILL_TILE)
    ]
    parts = parts_of_tiles([plan.starts[place] + begin for place, begin in tiles], wanted_parts)
    prefill = [(*tile, part, count) for tile, count in zip(tiles, parts, strict=True) for part in range(count)]
    return StepColumns(
        ids=token_ids(plan),
        token_rows=np.repeat(rows, counts),
        positions=np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], counts),
        rows=rows,
        contexts=starts + counts,
        query_starts=query_starts,
        decode_tiles=tile_starts((starts + counts)[:num_decodes]),
        prefill_tiles=np.array(prefill, np.int32).reshape(-1, 4).T,
        num_decodes=num_decodes,
        divided=len(prefill) > len(tiles),
    )


def parts_of_tiles(keys: list[int], wanted: int) -> list[int]:
    """Into how many parts the keys before each tile of queries are divided: by their number, ``wanted`` in all and at
    most one more for each tile."""
    if len(keys) >= wanted:
        return [1] * len(keys)
    each = max(-(-sum(keys) // wanted), _MIN_KEYS)
    return [1 + before // each for before in keys]


def decode_size(places: int) -> int:
    """Integers of a packed step of single tokens, without shared prefixes."""
    return 7 * places + 1


def token_ids(plan: StepPlan) -> np.ndarray:
    """[tokens] int32; -1 where the id is on the GPU only."""
    ids = np.frombuffer(plan.token_ids, np.uint32).astype(np.int32)
    ids[plan.device_tokens] = -1
    return ids


def aligned(count: int) -> int:
    """So many integers, and the rest up to a multiple of 16 bytes."""
    return -(-count // 4) * 4


def tile_starts(contexts: np.ndarray) -> np.ndarray:
    """[n + 1] int32: key tiles before each sequence."""
    starts = np.zeros(len(contexts) + 1, np.int32)
    np.cumsum((contexts + (DECODE_TILE - 1)) // DECODE_TILE, out=starts[1:])
    return starts


def send(packed: np.ndarray, to: torch.Tensor) -> None:
    """Copies integers to the GPU, from memory that stays untouched until the copy is done."""
    host = torch.empty(len(packed), dtype=torch.int32, pin_memory=to.is_cuda)
    host.numpy()[:] = packed
    to.copy_(host, non_blocking=True)


def send_columns(columns: list[Column], device: torch.device) -> list[torch.Tensor]:
    """The columns on the GPU, sent as one. Each begins at a multiple of 16 bytes."""
    starts = np.cumsum([0, *(aligned(len(column)) for column in columns)])
    packed = np.zeros(starts[-1], np.int32)
    for start, column in zip(starts, columns, strict=False):
        packed[start : start + len(column)] = column
    held = torch.empty(len(packed), dtype=torch.int32, device=device)
    send(packed, held)
    return [held[start : start + len(column)] for (start, _), column in zip(pairwise(starts), columns, strict=True)]

"""Where a step's queries and keys are, as the attention kernels read it: tensors that the whole step shares."""

from dataclasses import dataclass

import torch

# Keys that a decode program reads at once, and queries of a prefill program.
DECODE_TILE = 64
PREFILL_TILE = 128


@dataclass(frozen=True)
class GpuLayout:
    """What all attention layers of one step share. Sequences with one query token come first.

    Attributes:
        slot_mapping: [tokens] int64, where each token's key and value go; negative: nowhere.
        block_tables: [rows, most blocks] int32: every running sequence's blocks, by its row.
        rows: [sequences] int32: the sequences' rows.
        context_lens: [sequences] int32: tokens up to and with this step's; 0 for places that are not in use.
        decode_tiles: [decodes + 1] int32: tiles of ``DECODE_TILE`` keys of all decoding sequences before each one.
        num_decodes: sequences with a single query token, unused places included.
        query_starts: [sequences + 1] int32: where each sequence's queries begin in the step.
        prefill_tiles: [2, tiles] int32: of each tile of ``PREFILL_TILE`` queries, the sequence and the first query's
            place in the sequence's chunk. Sequences with one query token have none.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor
    context_lens: torch.Tensor
    decode_tiles: torch.Tensor
    num_decodes: int
    query_starts: torch.Tensor
    prefill_tiles: torch.Tensor

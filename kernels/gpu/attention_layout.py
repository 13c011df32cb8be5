"""Where a step's queries and keys are, as the attention kernels read it: tensors that the whole step shares."""

from dataclasses import dataclass

import torch

# Keys that a decode program reads at once, and queries of a prefill program.
DECODE_TILE = 64
PREFILL_TILE = 128
# Decoding sequences of a group that a program of shared-prefix attention computes together.
PREFIX_MEMBERS = 16


@dataclass(frozen=True)
class PrefixLayout:
    """Which decoding sequences of a step begin with the same blocks, and how those blocks' keys are dealt out.

    A *part* is what one program computes: some of a group's shared keys, for up to ``PREFIX_MEMBERS`` of its members,
    which are a *tile* of them.

    Attributes:
        sequences: [3, decodes] int32. Of each sequence: keys at its beginning that its group reads, a multiple of
            ``DECODE_TILE`` below its context, 0 without a group; in how many parts they are read; the number of the
            first one times ``PREFIX_MEMBERS``, plus the sequence's place in its tile.
        members: [tiles, PREFIX_MEMBERS] int32: each tile's sequences, the first of them real; negative: nobody.
        parts: [3, parts] int32: each part's tile, first key, and the key after its last; 0 keys where it is not in use.
        own_tiles: [decodes + 1] int32: ``GpuLayout.decode_tiles`` without the tiles of shared keys.
    """

    sequences: torch.Tensor
    members: torch.Tensor
    parts: torch.Tensor
    own_tiles: torch.Tensor


@dataclass(frozen=True)
class GpuLayout:
    """What all attention layers of one step share. Sequences with one query token come first.

    Where it is not known beforehand how many those are, as in a captured step of both kinds, there is a place for each
    that there can be, and the tokens of the others begin behind the last place in use: ``prefill_start`` is 0.

    Attributes:
        slot_mapping: [tokens] int64, where each token's key and value go; negative: nowhere.
        block_tables: [rows, most blocks] int32: every running sequence's blocks, by its row.
        rows: [sequences] int32: the sequences' rows.
        context_lens: [sequences] int32: tokens up to and with this step's; 0 for places that are not in use.
        decode_tiles: [decodes + 1] int32: tiles of ``DECODE_TILE`` keys of all decoding sequences before each one.
        num_decodes: places of sequences with a single query token, those not in use included.
        prefill_start: the first token that may be another sequence's.
        query_starts: [sequences + 1] int32: where each sequence's queries begin in the step.
        prefill_tiles: [4, tiles] int32: of each tile of ``PREFILL_TILE`` queries, the sequence and the first query's
            place in the sequence's chunk; and which part of the keys that they see is meant, of how many. The parts of
            a tile stand one after another. Negative: not in use. Sequences with one query token have none.
        divided: how many of the first tiles may be parts; 0: each is whole.
        prefixes: of decoding sequences; None where each reads its keys itself.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor
    context_lens: torch.Tensor
    decode_tiles: torch.Tensor
    num_decodes: int
    prefill_start: int
    query_starts: torch.Tensor
    prefill_tiles: torch.Tensor
    divided: int
    prefixes: PrefixLayout | None = None

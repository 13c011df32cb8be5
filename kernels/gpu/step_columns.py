"""Unpacks a step that the host sent as integers: brings block tables up to date, then makes each token's columns."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import dependent_launch, wait_for_previous

_BLOCK = 128


@triton.jit(do_not_specialize=["count"])
def _update_tables_kernel(places_ptr, blocks_ptr, table_ptr, count, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(DEPENDENT)
    place = tl.load(places_ptr + at, mask=at < count, other=-1)
    block = tl.load(blocks_ptr + at, mask=at < count, other=0)
    tl.store(table_ptr + place, block, mask=place >= 0)


# Columns of an odd number of tokens begin at any multiple of 8 bytes: not worth a kernel of their own.
@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["token_ptr", "position_ptr", "slot_ptr", "row_ptr"]
)
def _token_columns_kernel(
    ids_ptr, rows_ptr, positions_ptr, last_tokens_ptr, table_ptr, table_stride,
    token_ptr, position_ptr, slot_ptr, row_ptr, count,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    wait_for_previous(DEPENDENT)
    row = tl.load(rows_ptr + at, mask=inside, other=0)
    token = tl.load(ids_ptr + at, mask=inside, other=0).to(tl.int64)
    sampled = tl.load(last_tokens_ptr + row, mask=inside, other=0)
    position = tl.load(positions_ptr + at, mask=inside, other=-1)
    known = tl.maximum(position, 0)
    block = tl.load(table_ptr + row.to(tl.int64) * table_stride + known // BLOCK_SIZE, mask=inside, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + known % BLOCK_SIZE
    tl.store(token_ptr + at, tl.where(token < 0, sampled, token), mask=inside)
    tl.store(position_ptr + at, known.to(tl.int64), mask=inside)
    tl.store(slot_ptr + at, tl.where(position < 0, -1, slot), mask=inside)
    tl.store(row_ptr + at, row.to(tl.int64), mask=inside)


def update_tables(places: torch.Tensor, blocks: torch.Tensor, tables: torch.Tensor) -> None:
    """Writes new blocks into the rows' tables.

    Args:
        places: [n] int32: indices into the flattened tables; negative ones are passed over.
        blocks: [n] int32.
        tables: [rows, most blocks] int32, contiguous; changed in place.
    """
    count = places.shape[0]
    if count:
        dependent = dependent_launch(tables.device)
        _update_tables_kernel[(triton.cdiv(count, _BLOCK),)](
            places, blocks, tables, count, BLOCK=_BLOCK, DEPENDENT=dependent, launch_pdl=dependent
        )


def token_columns(
    ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, last_tokens: torch.Tensor, tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What the model reads of each token.

    Args:
        ids: [tokens] int32; negative: the id last sampled for the token's row.
        rows: [tokens] int32.
        positions: [tokens] int32; negative: the place is not in use.
        last_tokens: [rows] int64.
        tables: [rows, most blocks] int32.
        block_size: tokens a block.

    Returns:
        (token ids, positions, slots, rows), each [tokens] int64; the slot of a place not in use is -1.
    """
    count = ids.shape[0]
    token, position, slot, row = torch.empty((4, count), dtype=torch.int64, device=ids.device)
    dependent = dependent_launch(ids.device)
    _token_columns_kernel[(triton.cdiv(count, _BLOCK),)](
        ids, rows, positions, last_tokens, tables, tables.stride(0), token, position, slot, row, count,
        BLOCK_SIZE=block_size, BLOCK=_BLOCK, DEPENDENT=dependent, launch_pdl=dependent,
    )  # fmt: skip
    return token, position, slot, row

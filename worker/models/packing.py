"""The orders in which checkpoints pack 4-bit codes into 32-bit words."""

import torch

CONSECUTIVE = (0, 1, 2, 3, 4, 5, 6, 7)
"""Element i of eight is in bits 4 i to 4 i + 3: compressed-tensors."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Even elements are in a word's lower half, odd ones in its upper half: AutoAWQ's "gemm" version."""


def unpack(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Unpacks the last dimension.

    Args:
        words: [rows, n] int32.
        order: for each of a word's eight elements, which four bits of it they are, counted from the lowest.

    Returns:
        [rows, 8 n] uint8, from 0 to 15.
    """
    elements = [(words >> 4 * place & 15).to(torch.uint8) for place in order]
    return torch.stack(elements, dim=-1).flatten(-2)

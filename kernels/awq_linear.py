"""Matrix products with 4-bit weights and unquantized activations (W4A16), as AWQ made them (Lin et al., 2023).

Weights have one layout, whatever the checkpoint's was: int32 words, [out, tiles * 16]. A tile is 128 consecutive inputs
of an output; bits 4 j to 4 j + 3 of its word w are the code of its input 16 j + w. The last tile is filled up with
zeros.

So a kernel that owns rows of the weight reads whole sectors of consecutive words. Shift and mask of a tile of words
give sixteen consecutive inputs, the depth of one matrix instruction, with no exchange between threads, and one mask of
a word finds two codes 16 bits apart, as a pair of half-precision numbers wants them. Groups are multiples of 16 inputs,
so that those sixteen share their scale.
"""

import torch
import torch.nn.functional as F

from kernels.linear import linear

TILE_INPUTS = 128
TILE_WORDS = 16
CODES_PER_WORD = 8
SYMMETRIC_ZERO = 8
"""The code that means 0 where no zero points are given."""


def packed_width(in_features: int) -> int:
    """Words of a row of ``in_features`` codes."""
    return -(-in_features // TILE_INPUTS) * TILE_WORDS


def pack_weight(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes, [out, in] uint8 from 0 to 15, into [out, packed_width(in)] int32."""
    out_features, in_features = codes.shape
    tiles = F.pad(codes, (0, -in_features % TILE_INPUTS)).view(out_features, -1, CODES_PER_WORD, TILE_WORDS)
    words = tiles[:, :, 0].to(torch.int32)
    for place in range(1, CODES_PER_WORD):
        words |= tiles[:, :, place].to(torch.int32) << 4 * place
    return words.flatten(1)


def unpack_weight(weight: torch.Tensor, in_features: int) -> torch.Tensor:
    """Codes, [out, in] uint8, of a packed weight; the inverse of ``pack_weight``."""
    words = weight.view(weight.shape[0], -1, TILE_WORDS)
    planes = [(words >> 4 * place & 15).to(torch.uint8) for place in range(CODES_PER_WORD)]
    return torch.stack(planes, dim=2).flatten(1)[:, :in_features]


def dequantize_weight(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, in_features: int
) -> torch.Tensor:
    """``(code - zero) * scale``, [out, in] float32; the arguments are those of ``w4a16_linear``."""
    codes = unpack_weight(weight, in_features).float()
    groups = torch.arange(in_features, device=weight.device) // group_size
    zero = SYMMETRIC_ZERO if zeros is None else zeros.T.float()[:, groups]
    return (codes - zero) * scales.T.float()[:, groups]


def w4a16_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ dequantized.T + bias``, where ``dequantized = (code - zero) * scale``, rounded to the dtype of ``x``.

    Args:
        x: [tokens, in].
        weight: [out, packed_width(in)] int32, in this module's layout.
        scales: [groups, out], floating point; group g is of the inputs from ``g * group_size`` on.
        zeros: [groups, out] uint8; None is 8 everywhere.
        group_size: inputs that share a scale, a multiple of 16; the last group may be shorter.
        bias: [out], or None.

    Returns:
        [tokens, out], the dtype of ``x``. On a GPU, weights of products with few tokens are not rounded.
    """
    if x.is_cuda:
        from kernels.gpu import awq_linear as gpu

        if len(x) <= gpu.MAX_ROWS and x.dtype != torch.float32:
            return gpu.w4a16_linear(x, weight, scales, zeros, group_size, bias)
        return linear(x, gpu.dequantize_weight(weight, scales, zeros, group_size, x.shape[1], x.dtype), bias)
    return linear(x, dequantize_weight(weight, scales, zeros, group_size, x.shape[1]).to(x.dtype), bias)

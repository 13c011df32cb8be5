"""Matrix products of the layers' weights."""

import torch
import torch.nn.functional as F

from kernels.activation import GATED

_AMX_ROWS = 32


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``.

    On a CPU in bfloat16, a row's result does not depend on the rows beside it. oneDNN chooses the order of its sums by
    the number of rows: with AMX by all sizes of it, so that rows are computed in groups of one size, the last one
    padded; else only a single row is special, and computed as two, which costs no more, as both wait for the weights.

    Args:
        x: [tokens, in].
        weight: [out, in].
        bias: [out], or None.

    Returns:
        [tokens, out].
    """
    if x.is_cuda and x.dtype != torch.float32:
        from kernels.gpu.linear import MAX_ROWS, skinny_linear

        if x.shape[0] <= MAX_ROWS:
            return skinny_linear(x, weight, bias)
    if x.dtype == torch.bfloat16 and not x.is_cuda:
        if torch.cpu._is_amx_tile_supported():
            groups = F.pad(x, (0, 0, 0, -x.shape[0] % _AMX_ROWS)).split(_AMX_ROWS)
            return torch.cat([F.linear(group, weight, bias) for group in groups])[: x.shape[0]]
        if x.shape[0] == 1:
            return F.linear(x.expand(2, -1).contiguous(), weight, bias)[:1]
    return F.linear(x, weight, bias)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """``act(gate) * up`` of ``gate, up = linear(x, weight, bias)``, the halves of its outputs.

    Args:
        x: [tokens, in].
        weight: [2 * width, in], the gate's rows first.
        bias: [2 * width], or None.
        activation: a name in ``kernels.activation.GATED``.

    Returns:
        [tokens, width].
    """
    if x.is_cuda and x.dtype != torch.float32:
        from kernels.gpu.linear import MAX_ROWS, skinny_linear

        if x.shape[0] <= MAX_ROWS:
            return skinny_linear(x, weight, bias, activation)
    return GATED[activation](linear(x, weight, bias))

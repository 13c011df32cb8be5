"""Matrix products of the layers' weights."""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``.

    On a CPU in bfloat16, a row's result does not depend on the rows beside it: oneDNN sums a single row in an order of
    its own, so that one is computed as two. Two rows cost no more, as both wait for the weights.

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
    if x.shape[0] == 1 and x.dtype == torch.bfloat16 and not x.is_cuda:
        return F.linear(x.expand(2, -1).contiguous(), weight, bias)[:1]
    return F.linear(x, weight, bias)

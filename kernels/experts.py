"""Feed-forward layers of a mixture of experts: each token through the experts chosen for it."""

import torch

from kernels.activation import silu_mul


def experts_mlp(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts, ``down_e(silu_mul(gate_up_e(x)))``.

    Args:
        x: [tokens, hidden].
        gate_up: [experts, 2 * intermediate, hidden].
        down: [experts, hidden, intermediate].
        experts: [tokens, chosen] int64: the experts of each token.
        weights: [tokens, chosen], the dtype of ``x``.

    Returns:
        [tokens, hidden], the dtype of ``x``.
    """
    if x.is_cuda:
        from kernels.gpu.experts import experts_mlp as fast

        return fast(x, gate_up, down, experts, weights)
    out = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        hidden = silu_mul(x[tokens] @ gate_up[expert].T) @ down[expert].T
        out.index_add_(0, tokens, hidden * weights[tokens, place, None])
    return out

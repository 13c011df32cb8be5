"""Gated activations of feed-forward layers."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate (Shazeer, 2020): ``silu(gate) * up``.

    Args:
        gate_up: [..., 2 * intermediate], the gate's half first, as one fused projection writes it.

    Returns:
        [..., intermediate].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up

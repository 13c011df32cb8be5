"""Gated activations of feed-forward layers (GLU variants: Shazeer, 2020)."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate: ``silu(gate) * up``.

    Args:
        gate_up: [..., 2 * intermediate], the gate's half first, as one fused projection writes it.

    Returns:
        [..., intermediate].
    """
    if gate_up.is_cuda:
        from kernels.gpu.activation import silu_mul as fast

        return fast(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GeGLU's gate: ``gelu(gate) * up`` with the tanh approximation. Shapes as in ``silu_mul``."""
    if gate_up.is_cuda:
        from kernels.gpu.activation import gelu_tanh_mul as fast

        return fast(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


GATED = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
"""By the name of the activation."""

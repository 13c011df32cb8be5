"""Gated activations, a tile of columns of one row in each program."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import dependent_launch, wait_for_previous

_BLOCK = 1024


@triton.jit
def _gated_kernel(
    gate_up_ptr, out_ptr, size, GELU: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_previous(DEPENDENT)
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if GELU:
        # tanh(z) = 2 sigmoid(2 z) - 1
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        active = wide * tl.sigmoid(2 * inner)
    else:
        active = wide * tl.sigmoid(wide)
    tl.store(out_ptr + row * size + column, active.to(gate.dtype) * up, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``kernels.activation.silu_mul``."""
    return _launch(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``kernels.activation.gelu_tanh_mul``."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    rows = gate_up.numel() // (2 * size)
    if rows:
        dependent = dependent_launch(gate_up.device)
        _gated_kernel[(rows, triton.cdiv(size, _BLOCK))](
            gate_up, out, size, GELU=gelu, BLOCK=_BLOCK, DEPENDENT=dependent, launch_pdl=dependent
        )
    return out

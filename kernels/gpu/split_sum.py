"""The end of a product whose inputs are divided among programs: the last one sums the parts, in a fixed order."""

import torch
import triton
import triton.language as tl


@triton.jit
def store_sum(acc, out_ptr, bias_ptr, partial_ptr, arrived_ptr, at, written, column, there, plane, BIAS, SPLIT):
    """Writes a tile of ``x @ weight.T + bias``, once all parts of its inputs are there.

    Args:
        acc: [outputs, rows] float32: this part's sums. The part is program_id(1), the outputs are program_id(0)'s.
        partial_ptr: [SPLIT, plane] float32; arrived_ptr: a zero for each program_id(0), and zero again in the end.
        at, written: where the tile is in a plane of rows * out_features, and what of it there is.
        column, there: the tile's outputs, and which of them there are.
    """
    if SPLIT > 1:
        tl.store(partial_ptr + tl.program_id(1) * plane + at, acc, mask=written)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(arrived_ptr + tl.program_id(0), 0)
            acc = tl.zeros_like(acc)
            for part in range(SPLIT):
                acc += tl.load(partial_ptr + part * plane + at, mask=written, other=0.0, cache_modifier=".cg")
        written = written & last
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=written)


_arrivals: dict[torch.device, torch.Tensor] = {}


def arrival_counters(device: torch.device) -> torch.Tensor:
    """Zeros, 65,536 of them: between kernels, which run one after another on the device's one stream."""
    if device not in _arrivals:
        _arrivals[device] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    return _arrivals[device]

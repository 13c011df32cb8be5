"""8-bit floating point, float8_e4m3fn (Micikevicius et al., 2022): 3 bits of mantissa, at most 448, no infinity."""

from functools import cache

import torch

E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn."""

_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@cache
def has_float8(device: torch.device) -> bool:
    """Whether the device is a GPU with instructions for float8_e4m3fn (compute capability 8.9 and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def saturate(x: torch.Tensor) -> torch.Tensor:
    """``x`` rounded to float8_e4m3fn, with magnitudes above 448 cut to it.

    A plain cast makes them NaN in some releases of torch, also those that only rounding lifts above 448.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def widen(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of a float8_e4m3fn tensor in a wider dtype, which holds them exactly; contiguous.

    On a CPU they are looked up: torch computes each, five times as slowly.
    """
    if x.is_cuda:
        return x.to(dtype)
    return _VALUES.to(dtype).index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)

"""What all launches share: programmatic dependent launch, and the sizes of the GPU.

With programmatic dependent launch (compute capability 9.0 and newer), a kernel starts while the one before it still
runs, and waits inside, at ``wait_for_previous``, before it touches anything that another kernel writes. What comes
before the wait (index arithmetic, loads of weights) overlaps the other kernel's end. Every kernel of a chain must wait:
only then has everything launched earlier ended too.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on this device are launched before the one before them has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors; a small number of them in Triton's interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; those of an H200 in Triton's interpreter."""
    if device.type != "cuda":
        return 227 * 1024
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Lets the next kernel start, then waits until all earlier ones have ended and their writes can be read."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(ptr, size):
    """Asks for ``size`` bytes from each pointer on, both multiples of 16, into the L2 cache; reads nothing, and may be
    called before ``wait_for_previous`` for what is written meanwhile."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [ptr, size], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip

"""Decode attention of sequences that share a prefix: read once for all of them, and by each.

    python -m benchmarks.shared_prefix [--heads 32] [--kv-heads 8] [--head-dim 128]

Both must agree. Times are of a layer, in microseconds: by each, once, of that the group's part alone, and the floor of
reading each key and value once. The last rows show from where on it pays (see ``worker.shared_prefixes``).
"""

import argparse
from functools import partial

import torch

from benchmarks.kernels import microseconds, read_bandwidth, relative_error
from kernels.float8 import saturate
from kernels.gpu.decode_attention import num_shares
from kernels.gpu.shared_prefix_attention import shared_prefix_attention
from kernels.rotary_attention import rotary_attention
from worker.block_pool import BlockPool
from worker.gpu_input import GpuInputBuilder
from worker.sequence import token_array
from worker.shared_prefixes import PrefixGrouping
from worker.step_plan import StepPlan

DEVICE = torch.device("cuda")
BLOCK_SIZE = 16
# Sequences, shared tokens, own tokens.
SHAPES = (
    *((64, 8000, 64), (64, 8000, 320), (256, 8000, 64), (16, 32000, 64), (64, 2048, 256)),
    *((4, 8000, 64), (4, 4096, 64), (16, 1024, 64), (64, 1024, 1024), (8, 1024, 1024), (64, 256, 64)),
)


def plan_of(count: int, shared: int, own: int) -> StepPlan:
    """A step in which all sequences decode."""
    context = shared + own
    pool = BlockPool(count * -(-context // BLOCK_SIZE))
    common = pool.allocate(shared // BLOCK_SIZE)
    mine = -(-context // BLOCK_SIZE) - len(common)
    plan = StepPlan(1, rows=list(range(count)), starts=[context - 1] * count, counts=[1] * count)
    plan.block_tables = [[*common, *pool.allocate(mine)] for _ in range(count)]
    plan.started_rows, plan.token_ids = plan.rows, token_array()
    plan.token_ids.extend(plan.rows)
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    print("sequences x (shared + own) tokens: by each, once (group's part alone), floor")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        print(f"cache {dtype}")
        for shape in SHAPES:
            measure(shape, args.heads, args.kv_heads, args.head_dim, dtype, bandwidth)


def measure(
    shape: tuple[int, int, int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, bandwidth: float
) -> None:
    """Prints one row."""
    count, shared, own = shape
    plan = plan_of(count, shared, own)
    blocks, width = 1 + max(map(max, plan.block_tables)), len(plan.block_tables[0])
    block_bytes = 2 * BLOCK_SIZE * kv_heads * head_dim * dtype.itemsize
    layers = max(2, min(8, -(-(300 << 20) // (blocks * block_bytes))))
    caches = [
        torch.randn(2, blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(layers)
    ]
    if dtype.itemsize == 1:
        caches = [saturate(cache) for cache in caches]
    given = (
        torch.randn(count, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16, device=DEVICE),
        *(torch.ones(count, head_dim // 2, device=DEVICE), torch.zeros(count, head_dim // 2, device=DEVICE)),
    )
    scale = head_dim**-0.5
    grouping = PrefixGrouping(BLOCK_SIZE, num_shares(kv_heads, DEVICE), min_tokens_saved=1)
    alone, together = (
        GpuInputBuilder(count, width, BLOCK_SIZE, DEVICE, how).build(plan).attention for how in (None, grouping)
    )
    wanted = rotary_attention(*given, *caches[0], alone, scale)
    assert relative_error(rotary_attention(*given, *caches[0], together, scale), wanted) < 1e-2
    each, once = (
        microseconds([partial(rotary_attention, *given, *cache, layout, scale) for cache in caches])
        for layout in (alone, together)
    )
    part = microseconds(
        [partial(shared_prefix_attention, *given, *cache, together, scale, None, None) for cache in caches]
    )
    floor = (shared + count * own) * block_bytes / BLOCK_SIZE / bandwidth * 1e6
    print(f"{count:6} x ({shared:5} + {own:4}): {each:8.1f} {once:8.1f} ({part:6.1f}) {floor:8.1f}")


if __name__ == "__main__":
    main()

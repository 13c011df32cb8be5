"""The kernels one by one on a GPU, in CUDA graphs over rotating inputs: microseconds beside bytes and operations.

    python -m benchmarks.kernels [--tune] [--only attention float8 ...]

Each result is compared with float64 or float32 arithmetic before it is timed. ``--tune`` tries many cuts of the skinny
products and prints the best ones.
"""

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton

from kernels.gpu.attention_layout import DECODE_TILE, PREFILL_TILE, GpuLayout
from kernels.gpu.linear import Shape, skinny_linear

DEVICE = torch.device("cuda")
FLOAT8 = torch.float8_e4m3fn
TABLES = ("linear", "attention", "prefill", "small", "float8", "four-bit", "experts")


def microseconds(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """Median time of one call, from replays of a graph that makes all calls one after another."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes per second of reading 4 GiB: the ceiling of this run."""
    buffer = torch.ones(1 << 30, dtype=torch.float32, device=DEVICE)
    return buffer.nbytes / (microseconds([buffer.sum]) * 1e-6)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    return float(error)


@dataclass(frozen=True)
class Product:
    """A product of the 8B or 1B model: sizes of the weight, and whether its halves are gate and up."""

    out_features: int
    in_features: int
    activation: str | None = None

    def weights(self, kind: str) -> list[torch.Tensor]:
        """Copies enough that the L2 cache does not help."""
        size = self.out_features * self.in_features * (1 if kind == "fp8" else 2)
        copies = max(2, -(-(400 << 20) // size))
        made = (torch.randn(self.out_features, self.in_features, device=DEVICE) for _ in range(copies))
        return [weight.to(FLOAT8) if kind == "fp8" else weight.bfloat16() * 0.02 for weight in made]

    def x(self, rows: int, kind: str) -> torch.Tensor:
        x = torch.randn(rows, self.in_features, device=DEVICE)
        return x.to(FLOAT8) if kind == "fp8" else x.bfloat16()

    def call(self, x: torch.Tensor, weight: torch.Tensor, shape: Shape | None = None) -> torch.Tensor:
        """Of 8-bit operands, with scales of 0.02 and 1."""
        if x.dtype == torch.bfloat16:
            return skinny_linear(x, weight, None, self.activation, shape=shape)
        ones = torch.ones(len(x), device=DEVICE)
        scales = (ones, torch.full((self.out_features,), 0.02, device=DEVICE))
        return skinny_linear(x, weight, None, self.activation, scales, torch.bfloat16, shape)

    def error(self, found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
        """Relative, against the products of float32."""
        want = x.float() @ weight.float().T * (0.02 if x.dtype == FLOAT8 else 1.0)
        if self.activation:
            gate, up = want.chunk(2, -1)
            want = F.silu(gate) * up
        return relative_error(found, want)


PRODUCTS = {
    "qkv": Product(6144, 4096), "o": Product(4096, 4096), "gate_up": Product(28672, 4096, "silu"),
    "down": Product(4096, 14336), "lm_head": Product(128256, 4096),
    "qkv 1B": Product(3072, 2048), "o 1B": Product(2048, 2048), "gate_up 1B": Product(16384, 2048, "silu"),
    "down 1B": Product(2048, 8192),
}  # fmt: skip


def cuts(rows: int, gate: bool, kind: str) -> list[Shape]:
    """Cuts worth trying: those that fit and keep enough in flight."""
    found = []
    for block_out, block_in, split, warps in itertools.product((64, 128), (64, 128, 256), (1, 2, 4, 8), (4, 8)):
        if warps == 8 and block_out == 64:
            continue
        width = 1 if kind == "fp8" else 2
        step = block_in * width * (block_out * (2 if gate else 1) + max(triton.next_power_of_2(rows), 16))
        most = min(225_000 // step, 8)
        found += [Shape(block_out, block_in, split, stages, warps, 2) for stages in {most, most // 2} if stages >= 3]
    return found


def compile_cuts(task: tuple[int, Product, str, list[Shape]]) -> None:
    """Fills Triton's cache, in a process of its own."""
    rows, product, kind, shapes = task
    x, weight = product.x(rows, kind), product.weights(kind)[0]
    for shape in shapes:
        try:
            product.call(x, weight, shape)
        except Exception as error:
            print("cannot compile", shape, type(error).__name__)
    torch.cuda.synchronize()


def tune(rows_list: list[int], kinds: list[str], names: list[str], bandwidth: float) -> None:
    tasks = []
    for rows, kind, name in itertools.product(rows_list, kinds, ("qkv", "gate_up")):
        tried = cuts(rows, name == "gate_up", kind)
        tasks += [(rows, PRODUCTS[name], kind, tried[at::4]) for at in range(4)]
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_cuts, tasks))
    for kind, name in itertools.product(kinds, names):
        product = PRODUCTS[name]
        held = product.weights(kind)
        for rows in rows_list:
            x = product.x(rows, kind)
            size = held[0].nbytes + x.nbytes
            results = []
            for shape in cuts(rows, product.activation is not None, kind):
                try:
                    error = product.error(product.call(x, held[0], shape), x, held[0])
                    assert error < 1e-2, (shape, error)
                    results.append((microseconds([partial(product.call, x, w, shape) for w in held], 5), shape))
                except Exception as error:
                    print("failed", name, rows, shape, str(error)[:100])
            results.sort(key=lambda result: result[0])
            print(f"{name} {kind} rows {rows}: floor {size / bandwidth * 1e6:.1f} us")
            for time, shape in results[:6]:
                print(f"    {time:.1f} us {size / bandwidth / time * 1e8:.0f}%  {shape}", flush=True)


def linear_table(bandwidth: float, kinds: list[str]) -> None:
    print("skinny products: us, share of the read bandwidth (cuBLAS us, of bf16, without the gate)")
    for kind, (name, product) in itertools.product(kinds, PRODUCTS.items()):
        held = product.weights(kind)
        line = f"{name:>10} {kind}"
        for rows in (1, 8, 16, 32, 64):
            x = product.x(rows, kind)
            assert product.error(product.call(x, held[0]), x, held[0]) < 1e-2
            size = held[0].nbytes + x.nbytes
            time = microseconds([partial(product.call, x, w) for w in held])
            line += f" | {rows}: {time:6.1f} {size / bandwidth / time * 1e8:3.0f}%"
            if kind == "bf16":
                line += f" ({microseconds([partial(F.linear, x, w) for w in held]):.1f})"
        print(line)


def decode_layout(contexts: list[int], blocks: int) -> GpuLayout:
    count, width = len(contexts), max(-(-context // 16) for context in contexts)
    order = torch.randperm(blocks)
    table, taken = torch.zeros(count, width, dtype=torch.int32), 0
    for row, context in enumerate(contexts):
        size = -(-context // 16)
        table[row, :size] = order[taken : taken + size]
        taken += size
    lengths = torch.tensor(contexts, dtype=torch.int32)
    tiles = torch.cat((torch.zeros(1), ((lengths + DECODE_TILE - 1) // DECODE_TILE).cumsum(0)))
    last = torch.tensor([context - 1 for context in contexts])
    slots = table[torch.arange(count), last // 16] * 16 + last % 16
    return GpuLayout(
        slots.long().to(DEVICE), table.to(DEVICE),
        torch.arange(count, dtype=torch.int32, device=DEVICE), lengths.to(DEVICE), tiles.int().to(DEVICE), count, count,
        torch.arange(count + 1, dtype=torch.int32, device=DEVICE),
        torch.zeros(4, 0, dtype=torch.int32, device=DEVICE), 0,
    )  # fmt: skip


def attention_table(bandwidth: float, dtype: torch.dtype) -> None:
    from kernels.gpu.decode_attention import decode_attention

    print(f"decode attention, 32 heads, 8 kv heads, head 128, cache {dtype}: us, share of the read bandwidth")
    token = 2 * 8 * 128 * dtype.itemsize
    for contexts in ([1024], [8192], [1024] * 8, [1024] * 64, [1024] * 256, list(range(16, 2048, 16)), [32768] * 16):
        count = len(contexts)
        blocks = sum(-(-context // 16) for context in contexts)
        layers = max(2, min(8, -(-(300 << 20) // (blocks * 16 * token))))
        caches = [torch.randn(2, blocks, 16, 8, 128, device=DEVICE).to(dtype) for _ in range(layers)]
        layout = decode_layout(contexts, blocks)
        qkv = torch.randn(count, 48 * 128, device=DEVICE).bfloat16()
        cos, sin = torch.ones(count, 64, device=DEVICE), torch.zeros(count, 64, device=DEVICE)
        out = qkv.new_empty(count, 32, 128)

        def call(cache: torch.Tensor, given: tuple = (qkv, cos, sin), at: GpuLayout = layout, to=out) -> None:
            decode_attention(*given, *cache, at, 128**-0.5, None, None, None, None, to)

        call(caches[0])
        keys, values = (cache.flatten(0, 1) for cache in caches[0].float())
        for row in (0, count - 1):
            at = layout.block_tables[row].long().repeat_interleave(16) * 16 + torch.arange(16, device=DEVICE).repeat(
                layout.block_tables.shape[1]
            )
            at = at[: contexts[row]]
            want = F.scaled_dot_product_attention(
                qkv[row, :4096].view(8, 4, 128).float(), keys[at].transpose(0, 1), values[at].transpose(0, 1)
            )
            assert relative_error(out[row], want.reshape(32, 128)) < 1e-2
        time = microseconds([partial(call, cache) for cache in caches])
        size = sum(contexts) * token
        name = f"{count} x {contexts[0]}" if len(set(contexts)) == 1 else f"{count} mixed"
        print(f"    {name:>12}: {time:8.1f} us {size / bandwidth / time * 1e8:4.0f}%")


def prefill_table(dtype: torch.dtype) -> None:
    from kernels.gpu.prefill_attention import prefill_attention

    print(f"prefill attention, causal, 32 heads, 8 kv heads, head 128, cache {dtype}: us, TFLOP/s")
    for count, length in ((1, 8192), (8, 1024), (1, 2048), (4, 2048)):
        blocks = count * length // 16
        cache = torch.randn(2, blocks, 16, 8, 128, device=DEVICE).to(dtype)
        layout = decode_layout([length] * count, blocks)
        tiles = [(seq, start, 0, 1) for seq in range(count) for start in range(0, length, PREFILL_TILE)]
        layout = GpuLayout(
            layout.slot_mapping, layout.block_tables, layout.rows, layout.context_lens, layout.decode_tiles, 0, 0,
            torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * length,
            torch.tensor(tiles, dtype=torch.int32, device=DEVICE).T.contiguous(), 0,
        )  # fmt: skip
        query = torch.randn(count * length, 32, 128, device=DEVICE).bfloat16()
        out = torch.empty_like(query)
        prefill_attention(query, *cache, layout, 128**-0.5, None, None, out)
        at = (layout.block_tables[-1].long()[:, None] * 16 + torch.arange(16, device=DEVICE)).flatten()
        keys, values = (part.flatten(0, 1)[at].transpose(0, 1) for part in cache.bfloat16())
        want = F.scaled_dot_product_attention(
            query[-length:].transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
        )
        assert relative_error(out[-length:], want[0].transpose(0, 1)) < 1e-2
        time = microseconds([lambda: prefill_attention(query, *cache, layout, 128**-0.5, None, None, out)] * 3)
        print(f"    {count} x {length}: {time:8.1f} us {2 * count * length**2 * 4096 / time * 1e-6:5.0f} TFLOP/s")


def small_table() -> None:
    from kernels.activation import silu_mul
    from kernels.norm import add_rms_norm
    from kernels.rotary_kv import rotary_kv

    print("small kernels of the 8B model, a chain of 32: us each")
    cache = torch.zeros(2, 1024, 16, 8, 128, device=DEVICE).bfloat16()
    for rows in (1, 64, 256, 8192):
        x = torch.randn(rows, 4096, device=DEVICE).bfloat16()
        weight = torch.ones(4096, device=DEVICE).bfloat16()
        qkv = torch.randn(rows, 6144, device=DEVICE).bfloat16()
        gate_up = torch.randn(rows, 28672, device=DEVICE).bfloat16()
        angles = torch.rand(rows, 64, device=DEVICE)
        slots = torch.arange(rows, device=DEVICE)
        norm = microseconds([lambda: add_rms_norm(x, x, weight, 1e-5)] * 32)
        rotary = microseconds([lambda: rotary_kv(qkv, angles, angles, *cache, slots)] * 32)
        gated = microseconds([lambda: silu_mul(gate_up)] * 32)
        print(f"    {rows:>5} rows: norm {norm:.1f}, rotary_kv {rotary:.1f}, silu_mul {gated:.1f}")


def float8_table(bandwidth: float) -> None:
    from kernels import fp8_quantize
    from kernels.activation import silu_mul
    from kernels.fp8_linear import fp8_product
    from kernels.norm import add_rms_norm

    print("float8 products of quantized activations: us, share of the read bandwidth, TFLOP/s")
    for name, product in PRODUCTS.items():
        out_features, in_features = product.out_features, product.in_features
        held = [fp8_quantize.quantize_per_token(weight) for weight in product.weights("bf16")]
        held = [(weight, scale.flatten()) for weight, scale in held]
        line = f"{name:>10}"
        for rows in (1, 16, 64, 256, 8192):
            if rows * out_features > 1 << 28:
                continue
            x = fp8_quantize.quantize_per_token(torch.randn(rows, in_features, device=DEVICE))
            want = (x[0].float() @ held[0][0].float().T) * x[1] * held[0][1]
            assert relative_error(fp8_product(*x, *held[0], torch.bfloat16), want) < 1e-2
            size = held[0][0].nbytes + x[0].nbytes + rows * out_features * 2
            time = microseconds([lambda w=w, x=x: fp8_product(*x, *w, torch.bfloat16) for w in held])
            teraflops = 2 * rows * out_features * in_features / time * 1e-6
            line += f" | {rows}: {time:6.1f} {size / bandwidth / time * 1e8:3.0f}% {teraflops:4.0f}"
        print(line)
    print("the quantization before them, a chain of 32: us each, and of the plain operation before")
    for rows in (1, 64, 256, 8192):
        x = torch.randn(rows, 4096, device=DEVICE).bfloat16()
        gate_up, weight = torch.randn(rows, 28672, device=DEVICE).bfloat16(), torch.ones(4096, device=DEVICE).bfloat16()
        chains: dict[str, Callable[[], object]] = {
            "quantize": lambda x=x: fp8_quantize.quantize_per_token(x),
            "norm": lambda x=x, w=weight: add_rms_norm(x, x, w, 1e-5),
            "norm and quantize": lambda x=x, w=weight: fp8_quantize.add_rms_norm_quantize(x, x, w, 1e-5),
            "gate": lambda x=gate_up: silu_mul(x),
            "gate and quantize": lambda x=gate_up: fp8_quantize.silu_mul_quantize(x),
        }
        times = ", ".join(f"{name} {microseconds([call] * 32):.1f}" for name, call in chains.items())
        print(f"    {rows:>5} rows: {times}")


def four_bit_table(bandwidth: float) -> None:
    from kernels.awq_linear import packed_width, w4a16_linear
    from kernels.gpu.awq_linear import dequantize_weight

    print("4-bit products, groups of 128 with zero points: us, share of the read bandwidth; and the weight dequantized")
    for name, product in PRODUCTS.items():
        out_features, in_features = product.out_features, product.in_features
        groups, copies = in_features // 128, max(2, -(-(400 << 20) // (out_features * in_features // 2)))
        held = []
        for _ in range(copies):
            words = torch.randint(-(1 << 31), 1 << 31, (out_features, packed_width(in_features)), device=DEVICE)
            scales = torch.rand(groups, out_features, device=DEVICE).bfloat16() * 0.01
            zeros = torch.randint(0, 16, (groups, out_features), dtype=torch.uint8, device=DEVICE)
            held.append((words.int(), scales, zeros, 128))
        dense = dequantize_weight(*held[0], in_features, torch.float32)
        line = f"{name:>10}"
        for rows in (1, 8, 16, 32, 64, 128, 192, 256):
            x = torch.randn(rows, in_features, device=DEVICE).bfloat16()
            assert relative_error(w4a16_linear(x, *held[0]), x.float() @ dense.T) < 1e-2
            size = sum(part.nbytes for part in held[0][:3]) + x.nbytes + rows * out_features * 2
            time = microseconds([lambda w=w, x=x: w4a16_linear(x, *w) for w in held])
            line += f" | {rows}: {time:6.1f} {size / bandwidth / time * 1e8:3.0f}%"
        time = microseconds([lambda w=w: dequantize_weight(*w, in_features, torch.bfloat16) for w in held])
        print(f"{line} | {time:.1f}")


def experts_table(bandwidth: float) -> None:
    from kernels.experts import experts_mlp

    print("experts: us, share of the read bandwidth of the chosen ones' weights, TFLOP/s")
    models = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Mixtral-8x7B": (8, 2, 4096, 14336)}
    for name, (count, chosen, hidden, intermediate) in models.items():
        held = []
        for _ in range(2):
            gate_up = torch.randn(count, 2 * intermediate, hidden, device=DEVICE, dtype=torch.bfloat16) * 0.02
            down = torch.randn(count, hidden, intermediate, device=DEVICE, dtype=torch.bfloat16) * 0.02
            held.append((gate_up, down))
        line = f"{name:>15}"
        for rows in (1, 8, 64, 256, 8192):
            x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
            scores, experts = torch.rand(rows, count, device=DEVICE).softmax(dim=-1).topk(chosen)
            factors = scores.bfloat16()
            found = experts_mlp(x, *held[0], experts, factors)
            for row in {0, rows - 1}:
                parts = [
                    F.silu(gate) * up @ held[0][1][expert].float().T * score
                    for expert, score in zip(experts[row].tolist(), scores[row].tolist(), strict=True)
                    for gate, up in [(x[row].float() @ held[0][0][expert].float().T).chunk(2)]
                ]
                assert relative_error(found[row], torch.stack(parts).sum(dim=0)) < 2e-2
            size = len(experts.unique()) * 3 * hidden * intermediate * 2
            calls = [lambda w=w, x=x, e=experts, f=factors: experts_mlp(x, *w, e, f) for w in held] * 4
            time = microseconds(calls)
            teraflops = 6 * rows * chosen * hidden * intermediate / time * 1e-6
            line += f" | {rows}: {time:6.1f} {size / bandwidth / time * 1e8:3.0f}% {teraflops:4.0f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    parser.add_argument("--only", nargs="+", default=TABLES, choices=TABLES)
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    if "small" in args.only:
        small_table()
    if "attention" in args.only:
        attention_table(bandwidth, torch.bfloat16)
        attention_table(bandwidth, torch.float8_e4m3fn)
    if "prefill" in args.only:
        prefill_table(torch.bfloat16)
        prefill_table(torch.float8_e4m3fn)
    if "float8" in args.only:
        float8_table(bandwidth)
    if "four-bit" in args.only:
        four_bit_table(bandwidth)
    if "experts" in args.only:
        experts_table(bandwidth)
    if args.tune:
        tune(args.rows, args.weights, args.products, bandwidth)
    elif "linear" in args.only:
        linear_table(bandwidth, args.weights)


if __name__ == "__main__":
    main()

"""One decoder layer of a decode step on a GPU, in a CUDA graph of several: microseconds a layer, and what each cut of
its products does to it. The search for the cuts in ``kernels/gpu/linear.py``.

    python -m benchmarks.layer --model benchmarks/models/llama-3.1-8b --rows 1 64 [--search]
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.decode import read_bandwidth
from kernels.gpu import decode_attention, linear
from worker.block_pool import BlockPool
from worker.gpu_columns import decode_size, send
from worker.gpu_input import GpuInputBuilder
from worker.kv_cache import KVCache
from worker.loader import open_checkpoint
from worker.loader.weights import fill_randomly
from worker.models import build_model
from worker.sequence import token_array
from worker.step_plan import StepPlan

DEVICE = torch.device("cuda")
LAYERS = 8


class Layers:
    """Some layers of a model with a batch of sequences in its cache."""

    def __init__(self, folder: Path, rows: int, context: int) -> None:
        config = replace(open_checkpoint(folder).config, num_layers=LAYERS, vocab_size=1024)
        self.config, self.rows, self.context = config, rows, context
        torch.set_default_dtype(torch.bfloat16)
        with DEVICE:
            self.model = build_model(config, 2 * context)
        torch.set_default_dtype(torch.float32)
        fill_randomly(self.model, 0)
        blocks = rows * (context // 16 + 1)
        self.cache = KVCache(config, blocks, 16, torch.bfloat16, DEVICE)
        self.inputs = GpuInputBuilder(rows, context // 16 + 1, 16, DEVICE)
        pool = BlockPool(blocks)
        plan = StepPlan(1, rows=list(range(rows)), starts=[context - 1] * rows, counts=[1] * rows)
        plan.block_tables = [pool.allocate(context // 16) for _ in range(rows)]
        plan.started_rows = plan.rows
        plan.token_ids = token_array()
        plan.token_ids.extend(range(rows))
        step = self.inputs.build(plan)  # the tables
        del step
        self.packed = torch.empty(decode_size(rows), dtype=torch.int32, device=DEVICE)
        send(self.inputs.decode_columns(plan, rows), self.packed)

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        step = self.inputs.decode_input(self.packed, self.rows)
        return self.model(step.token_ids, step.positions, self.cache, step.attention)

    def microseconds(self) -> float:
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        times = []
        for _ in range(30):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times) / LAYERS

    def floor(self, bandwidth: float) -> float:
        """Microseconds to read a layer's weights and keys and values once."""
        config = self.config
        size = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
        size += 3 * config.hidden_size * config.intermediate_size
        size += self.rows * self.context * 2 * config.num_kv_heads * config.head_dim
        return size * 2 / bandwidth * 1e6


def search(layers: Layers) -> None:
    """Coordinate descent over the cuts of the four products, and over attention's settings."""
    chosen: dict[tuple[int, int], linear.Shape] = {}
    original = linear.choose_shape

    def choose(rows: int, width: int, in_features: int, *rest: object) -> linear.Shape:
        return chosen.get((width, in_features)) or original(rows, width, in_features, *rest)

    linear.choose_shape = choose
    parts = layers.model.model.layers[0]
    products = {
        "qkv": parts.self_attn.qkv_proj, "o": parts.self_attn.o_proj,
        "gate_up": parts.mlp.gate_up_proj, "down": parts.mlp.down_proj,
    }  # fmt: skip
    best = layers.microseconds()
    print(f"  begin {best:.1f}")
    stages = decode_attention._STAGES
    for trial in (3, 7):
        before, stages[2] = stages[2], trial
        time = layers.microseconds()
        print(f"  attention stages {trial}: {time:.1f}")
        if time < best - 0.1:
            best = time
        else:
            stages[2] = before
    for name, product in products.items():
        width, in_features = product.weights.weight.shape
        gated = name == "gate_up"
        key = (width // 2 if gated else width, in_features)
        now = choose(layers.rows, *key, gated, DEVICE)
        for field, values in (
            ("stages", (2, 3, 4, 5, 6)), ("split", (1, 2, 4, 8)), ("prefetch", (0, 2, 4, 8, 16, 32)),
            ("block_in", (64, 256)), ("stages", (2, 3, 4, 6, 8)), ("block_out", (64, 128)), ("warps", (4, 8)),
        ):  # fmt: skip
            for value in values:
                trial = replace(now, **{field: value})
                width = trial.block_out * (2 if gated else 1) + max(layers.rows, 16)
                if trial == now or trial.stages * trial.block_in * width * 2 > 225_000:
                    continue
                chosen[key] = trial
                try:
                    time = layers.microseconds()
                except OutOfResources:
                    time = float("inf")
                if time < best - 0.15:
                    best, now = time, trial
                chosen[key] = now
        print(f"  {name}: {best:.1f} {now}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "models" / "llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--search", action="store_true")
    args = parser.parse_args()
    bandwidth = read_bandwidth(DEVICE)
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    for rows in args.rows:
        layers = Layers(args.model, rows, args.context)
        time, floor = layers.microseconds(), layers.floor(bandwidth)
        print(f"{args.model.name}, {rows} rows: {time:.1f} us a layer, floor {floor:.1f} ({floor / time:.0%})")
        if args.search:
            search(layers)


if __name__ == "__main__":
    main()

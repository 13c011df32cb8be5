"""Steady decode (workload D): milliseconds per step at several batch sizes, beside the memory floor of the same run.

    python -m benchmarks.decode --model benchmarks/models/llama-3.1-8b --batch 1 8 64

Weights are random (speed does not depend on them). Every sequence has about ``--context`` tokens when timing starts.
The floor is the time to read the weights once and every sequence's keys and values once, at the read bandwidth measured
here and now. Before anything is timed, a tiny model's greedy output is compared with transformers' on the same device.
``--profile`` adds where the time of a step goes, kernel by kernel; kernels that overlap are counted in full.
"""

import argparse
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.kernel_profile import print_profile
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.kv_cache import bytes_per_block
from worker.loader import open_checkpoint
from worker.model_config import ModelConfig
from worker.quantization import W4A16, Fp8
from worker.sequence import SamplingParams, Sequence, token_array
from worker.setup import resolve_device, resolve_dtype, resolve_kv_cache_dtype
from worker.speculation.config import SpeculativeConfig
from worker.startup import build_engine


def check_correctness(device: torch.device, speculative: SpeculativeConfig | None = None) -> None:
    """Raises AssertionError unless a tiny model's greedy ids, also with drafts, equal transformers' in float32."""
    from tests.doubles.tiny_model import VOCAB, save_tiny

    with tempfile.TemporaryDirectory() as folder:
        oracle = save_tiny(Path(folder)).to(device)
        engine, _ = build_engine(
            WorkerConfig(
                model=Path(folder), device=str(device), dtype="float32", kv_cache_memory_bytes=1 << 22,
                speculative_config=speculative,
            )
        )  # fmt: skip
        prompts = [torch.randint(0, VOCAB, (length,)).tolist() for length in (1, 5, 33, 64, 150)]
        sequences = [make_sequence(prompt, 60) for prompt in prompts]
        for sequence in sequences:
            engine.add(sequence)
        while engine.has_unfinished:
            engine.step()
        for prompt, sequence in zip(prompts, sequences, strict=True):
            ids = torch.tensor([prompt], device=device)
            want = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=60, eos_token_id=None
            )
            assert sequence.tokens.tolist() == want[0].tolist(), f"wrong ids after a prompt of {len(prompt)}"


def make_sequence(prompt: list[int], max_tokens: int) -> Sequence:
    """A greedy sequence that nothing stops early."""
    tokens = token_array()
    tokens.extend(prompt)
    return Sequence("benchmark", tokens, SamplingParams(temperature=0.0), max_tokens)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of a plain read (a sum) over a buffer far larger than any cache."""
    size = (4 << 30) if device.type == "cuda" else (1 << 29)
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(10):
        best = min(best, timed(lambda: buffer.sum(), device))
    return size / best


def timed(work, device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


PROFILED = 8  # steps


def decode_steps(
    engine: Engine, vocab_size: int, batch: int, context: int, steps: int, profile: bool = False
) -> list[float]:
    """Seconds between the outputs of consecutive decode steps with the whole batch running."""
    # The first decode on while the last are still in prefill, two or so in a step.
    for _ in range(batch):
        prompt = torch.randint(0, vocab_size, (context - steps // 2,)).tolist()
        engine.add(make_sequence(prompt, steps + PROFILED + 16 + batch // 2))
    while any(sequence.num_output == 0 for sequence in (*engine.scheduler.running, *engine.scheduler.waiting)):
        engine.step()
    for _ in range(4):
        engine.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        output = engine.step()
        times.append(time.perf_counter() - started)
        assert len(output.tokens) == batch, "not every sequence decoded in this step"
    if profile:
        print_profile(f"at {batch}", engine.step, PROFILED)
    while engine.has_unfinished:
        engine.step()
    engine.scheduler.pool.clear_cache()
    return times


def weight_bytes(config: ModelConfig, dtype: torch.dtype, batch: int) -> float:
    """Bytes of the weights that a step of ``batch`` sequences reads; of experts, those of choices made at random."""
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    feed_forward: float = 3 * config.hidden_size * config.intermediate_size
    if config.experts is not None:
        count, chosen = config.experts.count, config.experts.per_token
        feed_forward = 3 * config.hidden_size * config.experts.intermediate_size
        feed_forward *= count * (1 - (1 - chosen / count) ** batch)
    size: float = dtype.itemsize
    if isinstance(config.quantization, Fp8):
        size = 1
    elif isinstance(config.quantization, W4A16):
        size = 0.5 + (dtype.itemsize + config.quantization.zero_points) / (config.quantization.group_size or math.inf)
    layers = config.num_layers * (attention + feed_forward) * size
    return layers + config.vocab_size * config.hidden_size * dtype.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "models" / "llama-3.1-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--profile", action="store_true", help="show where the time of a step goes")
    args = parser.parse_args()

    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    check_correctness(device)
    print("correctness: greedy ids of a tiny model equal transformers' on", device)
    bandwidth = read_bandwidth(device)
    config = open_checkpoint(args.model).config
    limit = args.context + args.steps + PROFILED + 64 + max(args.batch) // 2
    started = time.perf_counter()
    engine, limits = build_engine(
        WorkerConfig(
            model=args.model, device=args.device, dtype=args.dtype, load_format="dummy", max_model_len=limit,
            quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype,
            max_num_prefill_tokens_with_decodes=0,
            max_num_seqs=max(args.batch), num_gpu_blocks_override=max(args.batch) * -(-limit // 16) + 1,
        )
    )  # fmt: skip
    build_seconds = time.perf_counter() - started
    if args.quantization == "fp8":
        config = replace(config, quantization=Fp8("none"))
    cache_dtype = resolve_kv_cache_dtype(args.kv_cache_dtype, dtype, device)
    kv_token = bytes_per_block(config, 1, cache_dtype)

    rows = []
    for batch in args.batch:
        times = decode_steps(engine, limits.vocab_size, batch, args.context, args.steps, args.profile)
        median = statistics.median(times)
        floor = (weight_bytes(config, dtype, batch) + batch * args.context * kv_token) / bandwidth
        rows.append((batch, median * 1e3, floor * 1e3, floor / median, batch / median))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    forms = f"weights {config.quantization.method if config.quantization else dtype}, KV cache {cache_dtype}"
    print(f"{args.model.name}, {forms}, on {name}, torch {torch.__version__}, context {args.context}")
    print(f"read bandwidth {bandwidth / 1e9:.0f} GB/s, engine built in {build_seconds:.1f} s")
    print(f"{'batch':>6} {'ms/step':>9} {'floor ms':>9} {'of floor':>9} {'tok/s':>9}")
    for batch, median, floor, share, rate in rows:
        print(f"{batch:>6} {median:>9.2f} {floor:>9.2f} {share:>9.0%} {rate:>9.0f}")


if __name__ == "__main__":
    main()

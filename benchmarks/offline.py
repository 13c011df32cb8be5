"""Offline throughput (workload T: 512 requests of mixed lengths at once) and prefill (workload PF), without any server.

    python -m benchmarks.offline --model benchmarks/models/llama-3.1-8b
    python -m benchmarks.offline --only prefill

Weights are random. Before anything is timed, a tiny model's greedy output is compared with transformers' on the same
device.
On a CPU, --requests 64 and --max-output 64 keep it short.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.decode import check_correctness, make_sequence
from benchmarks.kernel_profile import print_profile
from quire.bench.workloads import mixed_lengths
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.sequence import Sequence
from worker.setup import resolve_device
from worker.startup import build_engine

PROFILED = 4  # steps


def mixed_requests(count: int, max_output: int) -> list[Sequence]:
    """Workload T's lengths; prompts are random tokens."""
    rng = np.random.default_rng(0)
    lengths = zip(*mixed_lengths(count, rng), strict=True)
    return [
        make_sequence(
            np.random.default_rng(1_000_000 + seed).integers(300, 32000, size=size).tolist(), min(output, max_output)
        )
        for seed, (size, output) in enumerate(lengths)
    ]


def run_all(engine: Engine, requests: list[Sequence], profile_at: tuple[int, ...] = ()) -> tuple[float, list[float]]:
    """Seconds until all have ended, and those of each step. ``profile_at``: steps from which on some are profiled."""
    for request in requests:
        engine.add(request)
    steps = []
    started = last = time.perf_counter()
    while engine.has_unfinished:
        if len(steps) in profile_at:
            running = len(engine.scheduler.running)
            print_profile(f"from {len(steps)}, {running} sequences", engine.step, PROFILED)
        engine.step()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    engine.scheduler.pool.clear_cache()
    return last - started, steps


def prompts(count: int, length: int) -> list[Sequence]:
    """``count`` random prompts of ``length`` tokens, which end with their first token."""
    rng = np.random.default_rng(count)
    return [make_sequence(rng.integers(300, 32000, size=length).tolist(), 1) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "models" / "llama-3.1-8b")
    parser.add_argument("--only", nargs="+", choices=("mixed", "prefill"), default=["mixed", "prefill"])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--max-output", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--profile", action="store_true", help="add where the GPU's time goes at some steps")
    args = parser.parse_args()

    device = resolve_device(args.device)
    check_correctness(device)
    print("correctness: greedy ids of a tiny model equal transformers' on", device)
    started = time.perf_counter()
    engine, _ = build_engine(
        WorkerConfig(
            model=args.model, device=args.device, load_format="dummy", max_model_len=8448,
            max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_prefill_tokens_with_decodes=0,
            enable_prefix_caching=False, quantization=args.quantization, kv_cache_dtype=args.kv_cache_dtype,
        )
    )  # fmt: skip
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    built = time.perf_counter() - started
    weights = args.quantization or "as they are"
    print(f"{args.model.name}, weights {weights}, on {name}, torch {torch.__version__}; engine built in {built:.1f} s")
    if "prefill" in args.only:
        for count, length in ((1, 8192), (16, 2048)):
            seconds = statistics.median(run_all(engine, prompts(count, length))[0] for _ in range(3))
            print(f"PF {count} x {length}: {seconds * 1e3:.1f} ms, {count * length / seconds:.0f} tokens/s", flush=True)
    if "mixed" in args.only:
        run_all(engine, mixed_requests(32, 16))
        if args.profile:
            run_all(engine, mixed_requests(args.requests, args.max_output), (2, 40, 200))
            run_all(engine, prompts(1, 8192), (0,))
        requests = mixed_requests(args.requests, args.max_output)
        seconds, steps = run_all(engine, requests)
        inputs = sum(request.num_prompt_tokens for request in requests)
        outputs = sum(request.num_output for request in requests)
        print(
            f"T {len(requests)} requests: {seconds:.2f} s, {outputs / seconds:.0f} output tokens/s, "
            f"{(inputs + outputs) / seconds:.0f} total tokens/s, {len(steps)} steps, "
            f"{engine.scheduler.num_preemptions} preemptions"
        )
        steps.sort()
        print(
            "step ms p10/p50/p90/max: "
            + " / ".join(f"{steps[int(len(steps) * q)] * 1e3:.2f}" for q in (0.1, 0.5, 0.9, 0.999))
        )


if __name__ == "__main__":
    main()

"""Speculative decoding by prompt lookup: steps and seconds with drafts, as a share of those without.

    python -m benchmarks.speculation
    python -m benchmarks.speculation --device cuda --model benchmarks/models/llama-3.1-8b

Two tasks: to copy a text of the prompt, for which prompt lookup is made, and to go on with a story at random, where
there is little to copy. A folder without weights gets random ones, and prompts of random tokens: an output that never
repeats itself has no drafts, so that what is left is the price of looking for some. First of all, a tiny model's greedy
output with drafts is compared with transformers', on the same device.

Requests run one after another, and all at once. Runs with and without drafts alternate, in one process and on engines
that are alike; medians are compared, of seconds by the clock and of the processor's. On a CPU in float32 every output
must be the same with and without. Where the machine does other things too, OMP_NUM_THREADS=1 makes the processor's
seconds those of the work alone: threads that wait for each other spin.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.decode import check_correctness
from quire.models import DEMO_MODEL, resolve
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.sequence import SamplingParams, Sequence, token_array
from worker.setup import resolve_device
from worker.speculation.config import SpeculativeConfig, parse_speculative_config
from worker.startup import build_engine

DEFAULT = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
NGRAM = SpeculativeConfig("ngram", 4, prompt_lookup_max=4, prompt_lookup_min=2)
LONGEST = 1024
TEXTS = (
    "The harbour master wrote down every ship by name, by cargo and by the hour at which it passed the outer light.",
    "In the third drawer lay two brass keys, a folded map of the northern canals and a receipt for eleven lamps.",
    "Copper is mined in the hills above the town, smelted beside the river and sold in bars at the autumn market.",
    "Each apprentice learned to cut the reed, to split it, to shave the tip and to bind it with waxed thread.",
    "The committee met on Tuesday, approved the minutes, heard the treasurer and adjourned at a quarter past nine.",
    "A glacier carries stones of every size and drops them, unsorted, wherever its ice happens to melt.",
    "def area(width, height):\n    if min(width, height) < 0:\n        raise ValueError\n    return width * height",
    "Mix the flour with salt and water, let the dough rest for an hour, fold it twice and bake it until it is brown.",
)


@dataclass(frozen=True)
class Run:
    """One task on one engine: seconds, those of the processor, steps, drafts, accepted drafts, and the outputs."""

    seconds: float
    processor: float
    steps: int
    drafted: int
    accepted: int
    outputs: list[list[int]]


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams, max_tokens: int, together: bool) -> Run:
    """Runs a task, all requests of it at once or one after another, from an empty prefix cache."""
    engine.scheduler.pool.clear_cache()
    speculator = engine.scheduler.speculator
    before = (speculator.num_draft_tokens, speculator.num_accepted_tokens) if speculator else (0, 0)
    steps = engine.num_steps
    started, worked = time.perf_counter(), time.process_time()
    sequences = []
    for prompt in prompts:
        tokens = token_array()
        tokens.extend(prompt)
        sequences.append(Sequence("benchmark", tokens, params, max_tokens))
        engine.add(sequences[-1])
        while engine.has_unfinished and not together:
            engine.step()
    while engine.has_unfinished:
        engine.step()
    seconds, processor = time.perf_counter() - started, time.process_time() - worked
    after = (speculator.num_draft_tokens, speculator.num_accepted_tokens) if speculator else (0, 0)
    outputs = [seq.tokens.tolist()[seq.num_prompt_tokens :] for seq in sequences]
    return Run(seconds, processor, engine.num_steps - steps, after[0] - before[0], after[1] - before[1], outputs)


def encoded_prompts(model: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of both tasks, of a model with a tokenizer."""
    from router.tokenizer_loading import load_tokenizer  # random weights need none of its libraries

    tokenizer = load_tokenizer(model)
    copies = [f"{text}\n\nThe same text again:\n\n{text}\n\nAnd again:\n\n" for text in TEXTS]
    stories = [f"{text} Once upon a time" for text in TEXTS]
    return [tokenizer.encode_text(text) for text in copies], [tokenizer.encode_text(text) for text in stories]


def random_prompts() -> tuple[list[list[int]], list[list[int]]]:
    """The same, about as long, of random tokens."""
    chance = random.Random(0)
    texts = [[chance.randrange(300, 30000) for _ in range(24)] for _ in TEXTS]
    return [[*text, *text] for text in texts], texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=DEMO_MODEL, help="with its tokenizer or without weights (default %(default)s)"
    )
    parser.add_argument("--speculative-config", default=json.dumps(DEFAULT), metavar="JSON")
    parser.add_argument("--dtype", help="default: auto on a GPU, else float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--tasks", nargs="+", choices=("copy", "story"), default=["copy", "story"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    device = resolve_device(args.device)
    dtype = args.dtype or ("auto" if device.type == "cuda" else "float32")
    speculative = parse_speculative_config(args.speculative_config)
    # A draft model has other tokens than the tiny one; what verifies drafts is the same for both ways.
    check_correctness(device, speculative if speculative.model is None else NGRAM)
    print("correctness: greedy ids of a tiny model with drafts equal transformers' on", device)
    model = resolve(args.model)
    random_weights = model.is_dir() and not list(model.glob("*.safetensors"))
    engines = [
        build_engine(
            WorkerConfig(
                model=model, device=args.device, dtype=dtype, max_model_len=LONGEST, max_num_batched_tokens=512,
                load_format="dummy" if random_weights else "auto", quantization=args.quantization,
                kv_cache_dtype=args.kv_cache_dtype, num_gpu_blocks_override=len(TEXTS) * LONGEST // 16,
                max_num_seqs=64, speculative_config=each,
            )
        )[0]
        for each in (None, speculative)
    ]  # fmt: skip
    copies, stories = random_prompts() if random_weights else encoded_prompts(model)
    tasks = {
        "copy": (copies, SamplingParams(temperature=0)),
        "story": (stories, SamplingParams(temperature=1.0, seed=1)),
    }
    tasks = {name: tasks[name] for name in args.tasks}
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    print(f"{model.name}, {machine}, torch {torch.__version__}, {dtype}; {args.speculative_config}", flush=True)
    for name, (prompts, params) in tasks.items():
        for together in (False, True):
            pairs = []
            for _ in range(args.rounds):
                plain, drafted = (run(engine, prompts, params, args.max_tokens, together) for engine in engines)
                differing = sum(a != b for a, b in zip(plain.outputs, drafted.outputs, strict=True))
                if differing and dtype == "float32" and device.type == "cpu":
                    raise SystemExit(f"{name}: {differing} of {len(prompts)} outputs differ with drafts")
                pairs.append((plain, drafted))
            seconds = [statistics.median(pair[side].seconds for pair in pairs) for side in (0, 1)]
            processor = [statistics.median(pair[side].processor for pair in pairs) for side in (0, 1)]
            plain, drafted = pairs[-1]
            print(
                f"{name}, {f'{len(prompts)} at once' if together else 'one by one'}: "
                f"steps {plain.steps} -> {drafted.steps} ({drafted.steps / plain.steps:.2f}), "
                f"seconds {seconds[0]:.2f} -> {seconds[1]:.2f} ({seconds[1] / seconds[0]:.2f}), "
                f"of the processor {processor[0]:.2f} -> {processor[1]:.2f} ({processor[1] / processor[0]:.2f}), "
                f"{drafted.accepted} of {drafted.drafted} drafts accepted, {differing} outputs differ",
                flush=True,
            )


if __name__ == "__main__":
    main()

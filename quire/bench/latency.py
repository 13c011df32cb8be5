"""``quire bench latency``: the engine alone, one batch from its prompts to its last tokens, step by step."""

import argparse
import os
import sys
import time
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from protos.logs import log_to_stderr
from quire.bench.engine_flags import add_engine_arguments, worker_config
from quire.bench.figures import Distribution
from quire.bench.plot import PlotError, check_plot, write_plot
from quire.bench.request_flags import not_negative, positive
from quire.bench.result_flags import add_result_arguments
from quire.bench.table import as_json, distributions, titled, write_json
from quire.models import ModelError, resolve

if TYPE_CHECKING:
    from worker.engine import Engine, EngineLimits

PROG = "quire bench latency"
_INTERRUPTED = 130
_FIRST_ID, _END_ID = 300, 32000  # random prompts are of ids between these, where the vocabulary has them


@dataclass
class Latencies:
    """Times of all iterations, in ms.

    Attributes:
        prefill: from the start until every sequence has its first token.
        decode: of each step after that.
        e2e: from the start to the last token.
        tokens: of outputs, in all iterations.
    """

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    tokens: int = 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``quire bench latency``."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        allow_abbrev=False,
        description="Time one batch in the engine alone, without servers: random prompts, greedy outputs that do not "
        "end early, all sequences at once.",
    )
    group = parser.add_argument_group("batch")
    group.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences (default %(default)s)")
    group.add_argument("--input-len", type=positive, default=32, metavar="N", help="tokens each (default %(default)s)")
    group.add_argument("--output-len", type=positive, default=128, metavar="N", help="default %(default)s")
    group.add_argument("--num-iters", type=positive, default=10, metavar="N", help="timed runs (default %(default)s)")
    group.add_argument(
        "--num-iters-warmup", type=not_negative, default=2, metavar="N", help="runs before (default %(default)s)"
    )
    add_engine_arguments(parser)
    add_result_arguments(parser, plotted="times of steps and runs")
    return parser


def main(argv: list[str]) -> int:
    """Runs the benchmark. Returns 0, 1 when it cannot run, 130 when it was interrupted."""
    args = build_parser().parse_args(argv)
    try:
        if args.plot is not None:
            check_plot(args.plot)
        worker_config(args, Path(os.devnull))  # what will be refused is better said before a model is downloaded
        config = worker_config(args, resolve(args.model))
    except (ValueError, ModelError, PlotError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    log_to_stderr(args.log_level, "bench", args.log_format)
    from worker.parallel.ranks import RankFailed
    from worker.startup import build_engine

    started = time.monotonic()
    try:
        engine, limits = build_engine(config)
    except (ValueError, RankFailed) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    built = time.monotonic() - started
    try:
        check_fits(limits, args.batch_size, args.input_len, args.output_len)
        found = Latencies()
        complete = _run_all(args, engine, limits, found)
    except ValueError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    finally:
        engine.close()
    _report(args, limits, found, built, complete)
    return 0 if complete else _INTERRUPTED


def check_fits(limits: "EngineLimits", batch: int, input_len: int, output_len: int) -> None:
    """Raises ValueError unless the engine can run the whole batch at once."""
    length = input_len + output_len
    if length > limits.max_model_len:
        raise ValueError(
            f"--input-len {input_len} and --output-len {output_len} are {length} tokens, but the engine takes "
            f"{limits.max_model_len} (--max-model-len)"
        )
    if batch > limits.max_num_seqs:
        raise ValueError(f"--batch-size is {batch}, but a step has {limits.max_num_seqs} sequences (--max-num-seqs)")
    needed = batch * -(-length // limits.block_size)
    if needed > limits.num_blocks:
        raise ValueError(
            f"--batch-size {batch} of {length} tokens each needs {needed} KV blocks of {limits.block_size} tokens, but "
            f"there are {limits.num_blocks} (--kv-cache-memory-bytes, --gpu-memory-utilization)"
        )


def _run_all(args: argparse.Namespace, engine: "Engine", limits: "EngineLimits", found: Latencies) -> bool:
    """All iterations. Returns whether none was interrupted."""
    rng = np.random.default_rng(args.seed)
    low, high = min(_FIRST_ID, limits.vocab_size // 2), min(_END_ID, limits.vocab_size)
    total = args.num_iters_warmup + args.num_iters
    try:
        for number in tqdm(range(total), unit="run", disable=not sys.stderr.isatty()):
            prompts = rng.integers(low, high, size=(args.batch_size, args.input_len)).tolist()
            run_batch(engine, prompts, args.output_len, found if number >= args.num_iters_warmup else Latencies())
    except KeyboardInterrupt:
        return False
    return True


def run_batch(engine: "Engine", prompts: Ordered[list[int]], output_len: int, found: Latencies) -> None:
    """Runs one batch, and adds its times to ``found``."""
    from quire.offline.interrupts import after_this
    from worker.sequence import SamplingParams, Sequence, token_array

    sequences = []
    for prompt in prompts:
        tokens = token_array()
        tokens.extend(prompt)
        sequences.append(Sequence("benchmark", tokens, SamplingParams(temperature=0.0), output_len))
    decode: list[float] = []
    prefill: float | None = None
    began = last = time.perf_counter()
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_unfinished:
        with after_this():
            output = engine.step()
        now = time.perf_counter()
        if not output.tokens:
            continue  # a step that is launched while none is settled; its time belongs to the next
        if prefill is not None:
            decode.append(1e3 * (now - last))
        elif all(sequence.num_output for sequence in sequences):
            prefill = 1e3 * (now - began)
        last = now
    engine.scheduler.pool.clear_cache()
    if any(sequence.num_output != output_len for sequence in sequences):
        raise ValueError("a sequence ended before its length; is the model's output all right?")
    found.prefill.append(prefill or 0.0)
    found.decode += decode
    found.e2e.append(1e3 * (last - began))
    found.tokens += len(sequences) * output_len


def _report(args: argparse.Namespace, limits: "EngineLimits", found: Latencies, built: float, complete: bool) -> None:
    seconds = sum(found.e2e) / 1e3
    title = f"{limits.model}: batch of {args.batch_size}, {args.input_len} tokens in, {args.output_len} out"
    rows = {
        "runs": f"{len(found.e2e):,}",
        "engine built in, s": f"{built:.2f}",
        "output tokens/s": f"{found.tokens / seconds:,.1f}" if seconds else "-",
    }
    times = {"prefill: all first tokens": found.prefill, "decode: a step": found.decode, "E2E: a run": found.e2e}
    told = {name: Distribution.of(values, args.percentiles) for name, values in times.items()}
    table = ("" if complete else "interrupted: what there is until then\n") + titled(title, rows) + distributions(told)
    sys.stdout.write(table)
    if args.json is not None:
        prefill, decode, e2e = map(as_json, told.values())
        result: dict[str, Any] = {"interrupted": not complete, "runs": len(found.e2e), "build_s": built}
        result |= {"output_tokens": found.tokens, "duration_s": seconds}
        result |= {"prefill_ms": prefill, "decode_step_ms": decode, "e2e_ms": e2e}
        write_json(args.json, "latency", vars(args), result)
    if args.plot is not None:
        write_plot(args.plot, title, times, table)

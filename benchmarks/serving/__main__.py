"""What the whole path costs: serving through gRPC and through the gateway's SSE, beside the engine by itself.

    python -m benchmarks.serving --model benchmarks/models/llama-3.1-8b
    python -m benchmarks.serving --model smollm2.gguf --requests 8 --input-len 64 --output-len 8 --prefix-len 128

Workloads: S, closed loop; SO, requests that arrive at random at 70 % of the rate that S had; P, one long prefix, cold,
warm, and shared by all streams. Prompts are random token ids, outputs greedy and of one length. Models without weights
get random ones, those without a tokenizer a made-up one. The servers are processes under ``quire serve``, or those at
--grpc and --http; clients are processes of their own. Before anything is timed, a few greedy outputs must be equal
through all three. Times are p50 / p99 in milliseconds; ITL is the time between two messages of a stream.
"""

import argparse
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.clients import Clients
from benchmarks.serving.engine_alone import EngineAlone
from benchmarks.serving.records import describe, rate
from benchmarks.serving.servable import servable
from benchmarks.serving.streams import FRONTS
from quire.bench.records import Job, Record
from quire.bench.servers import Servers
from worker.loader import open_checkpoint

NAME = "model"  # what the model is called over the wire
ALONE = "engine alone"
LOAD = 0.7  # of the rate that S had, in SO
CHECKED = (5, 33, 150)  # lengths of the prompts whose outputs are compared
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_num_prefill_tokens_with_decodes")  # of the engine
WARM = 5  # requests that find the prefix cached


class Prompts:
    """Random token ids, never the same twice, so that no run finds another's prompts cached.

    Args:
        vocab_size: of the model; ids below 300 may be control tokens.
        seed: of the first.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._end = min(vocab_size, 32000)

    def ids(self, length: int) -> list[int]:
        drawn: list[int] = self._rng.integers(300, self._end, size=length).tolist()
        return drawn


class Measurement:
    """The workloads through one way, ``runner``: clients, or the engine by itself."""

    def __init__(self, name: str, runner: Clients | EngineAlone, args: argparse.Namespace, prompts: Prompts) -> None:
        self.name = name
        self._runner, self._args, self._prompts = runner, args, prompts
        # Of each client: those who begin at once.
        self._first_wave = -(-args.streams // (args.clients if isinstance(runner, Clients) else 1))

    def _jobs(self, count: int) -> list[Job]:
        return [Job(self._prompts.ids(self._args.input_len), self._args.output_len) for _ in range(count)]

    def closed_loop(self) -> tuple[float, float]:
        """Workload S. Returns output tokens and requests per second."""
        streams = self._args.streams
        self._runner.run(self._jobs(streams), streams)  # kernels for these shapes, connections, memory
        records = self._runner.run(self._jobs(self._args.requests), streams)
        self._say("S", describe(records, self._first_wave))
        return rate(records)

    def open_loop(self, requests_per_s: float) -> None:
        """Workload SO, at this rate."""
        gaps = np.random.default_rng(0).exponential(1 / requests_per_s, self._args.requests)
        jobs = [replace(job, due=due) for job, due in zip(self._jobs(len(gaps)), accumulate(gaps), strict=True)]
        records = self._runner.run(jobs, self._args.streams)
        self._say(f"SO at {requests_per_s:.2f} requests/s", describe(records, 0))

    def shared_prefix(self) -> None:
        """Workload P."""
        args, prefix = self._args, self._prompts.ids(self._args.prefix_len)

        def jobs(count: int, output_len: int) -> list[Job]:
            return [Job([*prefix, *self._prompts.ids(args.own_len)], output_len) for _ in range(count)]

        cold = self._runner.run(jobs(1, 1), 1)[0].ttft
        warm = statistics.median(record.ttft for record in self._runner.run(jobs(WARM, 1), 1))
        self._say("P", f"TTFT cold {cold * 1e3:.2f}, warm {warm * 1e3:.2f} ({1 - warm / cold:.1%} saved)")
        together = self._runner.run(jobs(args.streams, args.output_len), args.streams)
        self._say(f"P, {args.streams} at once", describe(together, 0))

    def _say(self, workload: str, figures: str) -> None:
        print(f"{workload}, {self.name}: {figures}", flush=True)


def greedy(runner: Clients | EngineAlone, vocab_size: int, output_len: int) -> list[Record]:
    """Outputs of a few fixed prompts, one after another.

    Each is computed whole: in parts it is rounded differently, and random weights make near ties.
    """
    prompts = Prompts(vocab_size, 0)
    jobs = [Job(prompts.ids(length), output_len, reads_cache=False) for length in CHECKED]
    return [runner.run([job], 1)[0] for job in jobs]


def check_equal(name: str, found: list[Record], wanted: list[Record]) -> None:
    """Raises SystemExit when an output is not what another way gave: in ids, or in text where no ids are told."""
    for length, one, other in zip(CHECKED, found, wanted, strict=True):
        pair = (one.token_ids, other.token_ids) if one.token_ids else (one.text, other.text)
        if pair[0] != pair[1]:
            raise SystemExit(f"{name}: after a prompt of {length} tokens came {pair[0]}, not {pair[1]}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = Path(__file__).resolve().parents[1] / "models"
    parser.add_argument("--model", type=Path, default=models / "llama-3.1-8b", help="folder or .gguf file")
    parser.add_argument("--only", nargs="+", choices=("S", "SO", "P"), default=["S", "SO", "P"])
    parser.add_argument("--through", nargs="+", choices=(ALONE, *FRONTS), default=[ALONE, *FRONTS])
    parser.add_argument("--grpc", metavar="HOST:PORT", help="a running router, with --served-model-name model")
    parser.add_argument("--http", metavar="HOST:PORT", help="a running gateway before it")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--prefix-len", type=int, default=8000)
    parser.add_argument("--own-len", type=int, default=64)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--clients", type=int, default=4 if cores >= 12 else 1, help="processes (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts; another one for servers used before")
    for name in LIMITS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("device", "dtype", "quantization", "kv-cache-dtype", "kv-cache-memory-bytes", "load-format"):
        parser.add_argument(f"--{name}", type=int if name.endswith("bytes") else str)
    parser.add_argument("--shared-prefix-attention", action=argparse.BooleanOptionalAction)
    args = parser.parse_args()
    if (args.grpc is None) != (args.http is None):
        parser.error("--grpc and --http name two servers of one stack; give both or neither")
    args.clients = min(args.clients, args.streams)
    return args


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of worker and engine alike."""
    names = [*LIMITS, "device", "dtype", "quantization", "kv_cache_dtype", "kv_cache_memory_bytes", "load_format"]
    names.append("shared_prefix_attention")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    longest = max(args.input_len, args.prefix_len + args.own_len if "P" in args.only else 0, *CHECKED)
    return {"max_model_len": longest + max(args.output_len, 1) + 1, **given}


def as_flag(name: str, value: int | str | bool) -> list[str]:
    """A setting of the engine as a server takes it."""
    flag = name.replace("_", "-")
    return [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]


def main() -> None:
    args = parse_args()
    vocab_size = open_checkpoint(args.model).config.vocab_size
    arguments = engine_arguments(args)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model, load_format = servable(args.model, Path(folder))
        if load_format is not None:
            arguments.setdefault("load_format", load_format)
        rates: dict[str, tuple[float, float]] = {}
        wanted: list[Record] = []
        if ALONE in args.through:
            with EngineAlone(model, arguments) as engine:
                wanted = greedy(engine, vocab_size, args.output_len)
                measurement = Measurement(ALONE, engine, args, Prompts(vocab_size, args.seed))
                if "S" in args.only:
                    rates[ALONE] = measurement.closed_loop()
                if "P" in args.only:
                    measurement.shared_prefix()
        addresses = (args.grpc, args.http)
        if not args.grpc and set(args.through) != {ALONE}:
            flags = [part for name, value in arguments.items() for part in as_flag(name, value)]
            flags += ["--model", str(model), "--served-model-name", NAME]
            servers = stack.enter_context(Servers(flags))
            addresses = (servers.grpc, servers.http)
        fronts = {
            name: stack.enter_context(Clients(name, address, NAME, args.clients))
            for name, address in zip(FRONTS, addresses, strict=True)
            if name in args.through
        }
        for name, clients in fronts.items():
            found = greedy(clients, vocab_size, args.output_len)
            check_equal(name, found, wanted or found)
            wanted = wanted or found
        print("correctness: greedy outputs are equal through", ", ".join(args.through), flush=True)
        for place, (name, clients) in enumerate(fronts.items()):
            measurement = Measurement(name, clients, args, Prompts(vocab_size, args.seed + 1_000_000 * (place + 1)))
            if "S" in args.only:
                rates[name] = measurement.closed_loop()
            if "SO" in args.only and name in rates:
                measurement.open_loop(LOAD * rates[name][1])
            if "P" in args.only:
                measurement.shared_prefix()
    if ALONE in rates:
        for name, (tokens, _) in rates.items():
            if name != ALONE:
                print(f"S, {name}: {tokens / rates[ALONE][0]:.3f} of the engine's output tokens/s by itself")


if __name__ == "__main__":
    main()

"""Compares this project's gateway and router with other projects' programs, all in front of the same timed workers.

    python -m benchmarks.routing.peers --model smollm2.gguf --conversation conversation.jsonl \\
        --peer "sglang=VENV/bin/python -m sglang_router.launch_router" --peer "vllm=VENV/bin/vllm-router"

Each router gets the same streamed completions over HTTP, at the same times. The workers (timed_workers.py) are one
engine with two fronts: OpenAI's HTTP for the peers, gRPC for ours. A peer's command gets the flags that both of these
take: the workers' addresses, ``--policy cache_aware``, and where to listen; all else is as its authors chose it.

Times to the first token are of the workers' clock, from when a request was due to the first text at the client. The
trace is played ten times as fast, with one token in place of 32, slowly enough for two cores; what our router's rules
say in seconds is not made shorter, which is no advantage. The last columns tell how busy the cores were, and how late
the workers' events came at the 99th percentile: the machine must not be what is measured.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import uvloop

from benchmarks.routing.simulation import simulate
from benchmarks.routing.timed_workers import MODEL
from benchmarks.routing.virtual_worker import Job, Speed
from benchmarks.routing.workloads import mooncake, prefix_groups
from router.tokenizer_loading import load_tokenizer
from tests.doubles.processes import free_port

WORKERS = 8
OURS = "quire"
_READY_S = 90.0


@dataclass(frozen=True)
class Workload:
    """What is sent.

    Attributes:
        jobs: by seed.
        block_size: tokens on the wire.
        factor: tokens that one on the wire stands for.
        cache_tokens: of each worker.
        scale: the workers' seconds in one of the machine's.
    """

    name: str
    jobs: Callable[[int], list[Job]]
    block_size: int
    factor: int
    cache_tokens: int
    scale: float


@dataclass(frozen=True)
class Result:
    """What a router made of a workload; times are seconds of the workers' clock, busy ones cores."""

    ttft_s: list[float]
    hit_rate: float
    most: float
    busy: float
    late_ms: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.ttft_s)

    @property
    def p90(self) -> float:
        return sorted(self.ttft_s)[int(0.9 * len(self.ttft_s))]


class Prompts:
    """Texts in which every word is one token, and equal blocks are equal words.

    Args:
        model: the demo model, for its tokenizer.
    """

    def __init__(self, model: Path) -> None:
        tokenizer = load_tokenizer(model, None)
        texts = [tokenizer.decode([token]) for token in range(1000, 8000)]
        words = [text for text in texts if text[0] == " " and text[1:].isalpha() and text.isascii() and len(text) > 3]
        random.Random(0).shuffle(words)
        whole = "".join(words)
        if len(tokenizer.encode_text(whole, add_special_tokens=False)) != len(words):
            raise ValueError(
                f"{model}: its tokenizer does not make one token of each of these words; give another model"
            )
        self._words = words

    def of(self, job: Job, number: int, block_size: int, factor: int) -> str:
        """The prompt of a job, as it goes over the wire; what is beyond its named blocks is its own."""
        tokens = max(-(-job.prompt_tokens // factor), block_size * len(job.names))
        words = [word for name in job.names for word in random.Random(name).choices(self._words, k=block_size)]
        words += random.Random(number).choices(self._words, k=tokens - len(words))
        return "".join(words)


class Processes:
    """Child processes, ended together."""

    def __init__(self, log: TextIO) -> None:
        self._log = log
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **options: Any) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(command, stderr=self._log, **{"stdout": self._log, **options})
        self.all.append(child)
        return child

    def busy_s(self) -> float:
        """Processor time that they and this process have used, in seconds."""
        ticks = 0
        for child in self.all:
            fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()

    def end(self) -> None:
        for child in reversed(self.all):
            child.terminate()
        for child in self.all:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


async def first_text(port: int, prompt: str, max_tokens: int) -> float:
    """Sends a completion and reads it to its end. Returns when its first text came, by the loop's time."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        )
        status = await reader.readline()
        if b" 200 " not in status:
            raise ConnectionError(f"the router answered {status.decode().strip()}")
        first = None
        while line := await reader.readline():
            if first is None and line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                first = asyncio.get_running_loop().time()
            if line.startswith(b"data: [DONE]"):
                break
        if first is None:
            raise ConnectionError("a stream ended without any text")
        return first
    finally:
        writer.close()


async def run(
    processes: Processes,
    router: str,
    command: str,
    workload: Workload,
    prompts: list[str],
    jobs: list[Job],
    model: Path,
) -> Result:
    """Starts workers and router, and sends all jobs; the caller ends the processes."""
    front = "grpc" if router == OURS else "http"
    blocks = workload.cache_tokens // workload.factor // workload.block_size
    workers = processes.start(
        sys.executable, "-m", "benchmarks.routing.timed_workers", "--front", front, "--workers", str(WORKERS),
        "--scale", str(workload.scale), "--block-size", str(workload.block_size), "--factor", str(workload.factor),
        "--cache-blocks", str(blocks), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert workers.stdout is not None
    assert workers.stdin is not None
    ports = json.loads(await asyncio.to_thread(workers.stdout.readline))
    port, other = free_port(), free_port()
    if router == OURS:
        addresses = [f"127.0.0.1:{worker}" for worker in ports]
        processes.start(
            sys.executable, "-m", "router", "--model", str(model), "--served-model-name", MODEL, "--port", str(other),
            "--worker-urls", *addresses, *shlex.split(command),
        )  # fmt: skip
        processes.start(sys.executable, "-m", "gateway", "--port", str(port), "--router", f"127.0.0.1:{other}")
    else:
        processes.start(
            *shlex.split(command), "--worker-urls", *(f"http://127.0.0.1:{worker}" for worker in ports),
            "--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1",
            "--prometheus-port", str(other),
        )  # fmt: skip
    await _until_ready(port, prompts[0].split()[0])
    loop = asyncio.get_running_loop()
    busy, start = processes.busy_s(), loop.time()
    ttft_s: list[float] = []

    async def send(job: Job, prompt: str) -> None:
        due = start + job.arrival_s / workload.scale
        await asyncio.sleep(due - loop.time())
        ttft_s.append((await first_text(port, prompt, job.output_tokens) - due) * workload.scale)

    await asyncio.gather(*(send(job, prompt) for job, prompt in zip(jobs, prompts, strict=True)))
    cores = (processes.busy_s() - busy) / (loop.time() - start)
    workers.stdin.close()
    told = json.loads(await asyncio.to_thread(workers.stdout.readline))
    return Result(ttft_s, told["cached_tokens"] / told["prompt_tokens"], told["most"], cores, told["late_ms"])


async def _until_ready(port: int, word: str) -> None:
    async with asyncio.timeout(_READY_S):
        while True:
            try:
                for _ in range(2 * WORKERS):
                    await first_text(port, f" {word}", 1)
                return
            except (OSError, KeyError):
                await asyncio.sleep(0.2)


def workloads(args: argparse.Namespace) -> list[Workload]:
    """Those that were asked for."""
    found = []
    if args.conversation is not None:
        found.append(
            Workload(
                f"conversation 1.3x, {args.requests} requests",
                lambda seed: mooncake(args.conversation, 1.3, seed)[: args.requests],
                16,
                32,
                1_000_000,
                args.scale,
            )
        )
    # Here memory is short, and our router weighs that against seconds of waiting: its clock must be the workers'.
    groups_requests = min(args.requests, 1500)
    seconds = groups_requests / 20
    found.append(
        Workload(
            f"150 prefix groups, 20/s, {groups_requests} requests, caches 75 % full of prefixes",
            lambda seed: prefix_groups(20, seconds, 400, seed),
            400,
            1,
            150_000,
            1.0,
        )
    )
    return [workload for workload in found if args.only in workload.name]


async def compare(
    workload: Workload, routers: dict[str, str], words: Prompts, args: argparse.Namespace, log: TextIO
) -> None:
    """Runs a workload with every router and prints a row for each."""
    results: dict[str, list[Result]] = {router: [] for router in routers}
    ideal = []
    for seed in range(args.runs):
        jobs = workload.jobs(seed)
        prompts = [words.of(job, number, workload.block_size, workload.factor) for number, job in enumerate(jobs)]
        order = list(routers) if seed % 2 else list(reversed(routers))
        for router in order:
            processes = Processes(log)
            try:
                command = routers[router]
                results[router].append(await run(processes, router, command, workload, prompts, jobs, args.model))
            finally:
                processes.end()
        speed = Speed(cache_tokens=workload.cache_tokens)
        outcome = simulate(jobs, [speed] * WORKERS, workload.block_size * workload.factor, "own prefix", seed)
        ideal.append((outcome.mean, outcome.quantile(0.9)))
    print(f"\n{workload.name}; {args.runs} runs; a second of the machine is {workload.scale:g} s of the workers")
    print(f"{'router':12} {'mean s':>8} {'p90 s':>8} {'cached':>7} {'max/mean':>9}   ours / it: mean, p90 (range)"
          f"{'':12} {'cores':>6} {'late ms':>8}")  # fmt: skip
    for router, rows in results.items():
        ratios = [
            sorted(getattr(ours, what) / getattr(row, what) for ours, row in zip(results[OURS], rows, strict=True))
            for what in ("mean", "p90")
        ]
        shown = ", ".join(f"{statistics.median(r):.2f} ({r[0]:.2f}-{r[-1]:.2f})" for r in ratios)

        def median(what: str, rows: list[Result] = rows) -> float:
            return statistics.median(getattr(row, what) for row in rows)

        print(f"{router:12} {median('mean'):8.2f} {median('p90'):8.2f} {median('hit_rate'):7.3f} {median('most'):9.2f}"
              f"   {shown:40} {median('busy'):6.2f} {median('late_ms'):8.1f}", flush=True)  # fmt: skip
    mean, p90 = (statistics.median(of) for of in zip(*ideal, strict=True))
    print(f"{'ours, virtual':13} {mean:7.2f} {p90:8.2f}   in virtual time, where nothing but the workers takes any")


async def measure(args: argparse.Namespace) -> None:
    words = Prompts(args.model)
    routers = dict(peer.split("=", 1) for peer in args.peer)
    routers[OURS] = args.flags
    with args.log.open("w") as log:
        for workload in workloads(args):
            await compare(workload, routers, words, args, log)


def main() -> None:
    """Parses the flags and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the demo model, for its tokenizer")
    parser.add_argument("--conversation", type=Path, help="Mooncake's conversation trace")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=COMMAND", help="another router, repeatable"
    )
    parser.add_argument("--flags", default="", help="more flags for our router")
    parser.add_argument("--requests", type=int, default=2400)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=10.0, help="how much faster the trace is played")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="file for what the processes say")
    parser.add_argument("--only", default="", help="workloads whose names contain this")
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()

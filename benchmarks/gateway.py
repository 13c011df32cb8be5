"""What gateway and router add to the time between two tokens, and how many tokens a gateway process carries.

    python -m benchmarks.gateway --model smollm2.gguf [--streams 64] [--rate 50] [--tokens 500] [--processes 1]

Real router and gateway processes stand between a worker without a model and clients that read HTTP streams here. First
the worker gives every stream a token at fixed times and notes when; the clients note when each arrives (all processes
have one monotonic clock). Then it gives tokens as fast as the router takes them; they are counted per second of the
gateway's processor time too, since all processes share the cores. Every client checks that it got all tokens.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import uvloop

from tests.doubles.processes import free_port, wait_until

_DONE = b"data: [DONE]\n\n"


@dataclass
class Stack:
    """Worker, router and gateway, running."""

    worker: "subprocess.Popen[str]"
    router: "subprocess.Popen[Any]"
    gateway: "subprocess.Popen[Any]"
    port: int

    def notes(self) -> dict[str, Any]:
        """Ends all three; the worker tells when it did what."""
        self.end(self.gateway, self.router)
        out, _ = self.worker.communicate("", timeout=30)
        notes: dict[str, Any] = json.loads(out)
        return notes

    @staticmethod
    def end(*processes: "subprocess.Popen[Any]") -> None:
        """Ends those that still run, in this order."""
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


@contextmanager
def running(model: Path, slots: int, step_s: float, processes: int) -> Iterator[Stack]:
    """Starts all three and ends them."""
    python = [sys.executable, "-m"]
    quiet = ["--log-level", "warning"]
    port, router_port = free_port(), free_port()
    worker = subprocess.Popen(
        [*python, "benchmarks.paced_worker", str(slots), str(step_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert worker.stdout is not None
    worker_port = worker.stdout.readline().strip()
    router = subprocess.Popen(
        [*python, "router", "--model", str(model), "--port", str(router_port), "--served-model-name", "demo", *quiet,
         "--worker-urls", f"127.0.0.1:{worker_port}"],
    )  # fmt: skip
    gateway = subprocess.Popen(
        [*python, "gateway", "--port", str(port), "--router", f"127.0.0.1:{router_port}", *quiet,
         "--processes", str(processes)],
    )  # fmt: skip
    try:
        wait_until(lambda: _serves(port))
        yield Stack(worker, router, gateway, port)
    finally:
        Stack.end(gateway, router, worker)


def _serves(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


async def stream(port: int, number: int, tokens: int) -> list[float]:
    """One stream, whose prompt has ``number`` tokens. Returns when each of its chunks of text came."""
    body = {"model": "demo", "prompt": [1] * number, "max_tokens": tokens, "stream": True, "temperature": 0}
    raw = json.dumps({**body, "ignore_eos": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\nconnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + raw)
    times: list[float] = []
    tail = b""
    while data := await reader.read(1 << 16):
        now = time.monotonic()
        # Each chunk of text has this once; what may be cut is looked at again.
        text = tail + data
        times += [now] * text.count(b'"finish_reason":null')
        tail = text[text.rfind(b"\n") + 1 :] if not text.endswith(b"\n") else b""
        if _DONE in text[-64:]:
            assert f'"completion_tokens":{tokens},'.encode() in text
    writer.close()
    return times


async def streams(port: int, count: int, tokens: int) -> list[list[float]]:
    """So many streams at once, with prompts of 1, 2, 3 … tokens."""
    return await asyncio.gather(*(stream(port, number, tokens) for number in range(1, count + 1)))


def processor_seconds(owner: int) -> float:
    """What a process and those that it started have used."""
    children = Path(f"/proc/{owner}/task/{owner}/children").read_text().split()
    fields = Path(f"/proc/{owner}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_seconds(int(child)) for child in children)


def measure_gaps(args: argparse.Namespace) -> None:
    """Tokens at fixed times."""
    with running(args.model, args.streams, 1 / args.rate, args.processes) as stack:
        arrivals = uvloop.run(streams(stack.port, args.streams, args.tokens))
        notes = stack.notes()
    delays, added, merged = [], [], 0
    for number, times in enumerate(arrivals, start=1):
        if len(times) != args.tokens:
            merged += 1  # some chunks have two tokens: which is whose is not known
            continue
        first = notes["first_steps"][str(number)]
        sent = notes["steps"][first : first + args.tokens]
        late = [came - went for came, went in zip(times, sent, strict=True)]
        delays += late
        added += [after - before for before, after in pairwise(late)]
    print(
        f"{args.streams} streams of {args.rate} tokens a second, {args.tokens} each; {merged} streams had merged chunks"
    )
    _print("from worker to client, ms", delays)
    # A token that is late makes the gap before it longer and the next one shorter.
    _print("added to the gaps that grew, ms", [gap for gap in added if gap > 0])


def _print(what: str, seconds: Sequence[float]) -> None:
    if len(seconds) > 1:
        cuts = statistics.quantiles((value * 1e3 for value in seconds), n=100)
        print(f"    {what:<36} p50 {cuts[49]:6.2f}, p99 {cuts[98]:6.2f}, max {max(seconds) * 1e3:6.2f}")


def measure_rate(args: argparse.Namespace) -> None:
    """Tokens as fast as they go."""
    with running(args.model, args.streams, 0, args.processes) as stack:
        uvloop.run(streams(stack.port, args.streams, 20))
        before, began = processor_seconds(stack.gateway.pid), time.monotonic()
        arrivals = uvloop.run(streams(stack.port, args.streams, 4 * args.tokens))
        wall, used = time.monotonic() - began, processor_seconds(stack.gateway.pid) - before
    tokens, chunks = args.streams * 4 * args.tokens, sum(map(len, arrivals))
    print(f"as fast as they go, {args.processes} gateway processes: {tokens / wall:,.0f} tokens/s, "
          f"{tokens / chunks:.1f} tokens a chunk; of the gateways' processor time, {tokens / used:,.0f} tokens/s and "
          f"{chunks / used:,.0f} chunks/s")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the demo model, for its tokenizer")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=50, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--processes", type=int, default=1, help="of the gateway")
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    measure_gaps(args)
    measure_rate(args)


if __name__ == "__main__":
    main()

"""What batching is worth on a CPU: chats that arrive together at Quire, and the same one after another at transformers.

    python -m benchmarks.cpu_batching --dtype float32 --requests 16 --max-tokens 64

Both sides run the same weights in the same dtype on the same number of threads, get the same prompt ids, choose
greedily and generate exactly ``--max-tokens`` each. Quire is measured from outside, through HTTP with streaming:
gateway, router, worker and all their overhead count. transformers is measured around ``generate`` alone, with its
key-value cache on. Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import httpx

from protos import inference_pb2, inference_pb2_grpc
from quire.models import DEMO_MODEL, resolve, served_name
from quire.placement import usable_cores
from quire.plan import child_environment
from quire.ports import PortWish, choose_ports
from quire.readiness import until_http_serves

TOPICS = (
    "rivers", "bridges", "bread", "glaciers", "violins", "bees", "maps", "tides",
    "printing", "silk", "volcanoes", "chess", "lighthouses", "salt", "owls", "clocks",
)  # fmt: skip
START_S = 300.0


@dataclass(frozen=True)
class Result:
    """One side's measurement."""

    seconds: float
    tokens: int
    answers: list[str]

    @property
    def rate(self) -> float:
        """Output tokens per second, all requests together."""
        return self.tokens / self.seconds


def make_chats(count: int) -> list[list[dict[str, str]]]:
    """Chats that differ from their first word on, so that no prefix is shared."""
    return [
        [{"role": "user", "content": f"{TOPICS[i % len(TOPICS)].capitalize()}, part {i}: write a short story."}]
        for i in range(count)
    ]


@contextlib.asynccontextmanager
async def running_stack(args: argparse.Namespace) -> AsyncIterator[tuple[str, str]]:
    """A ``quire serve`` on free ports; gives the URL of its OpenAI API and its gRPC address."""
    port, grpc_port = choose_ports([PortWish("", "127.0.0.1", 0)] * 2)
    flags = {
        **{"--model": args.model, "--port": port, "--grpc-port": grpc_port, "--worker-port": 0},
        **{"--device": "cpu", "--dtype": args.dtype, "--max-num-seqs": args.requests, "--max-model-len": 2048},
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire", "serve"),
        *(str(part) for flag in flags.items() for part in flag),
        env={**child_environment(os.environ), "OMP_NUM_THREADS": str(args.threads)},
        stdout=asyncio.subprocess.DEVNULL,
    )
    ready = asyncio.create_task(until_http_serves(f"http://127.0.0.1:{port}/health"))
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait([ready, ended], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise SystemExit("quire serve did not start; its messages are above")
        yield f"http://127.0.0.1:{port}/v1", f"127.0.0.1:{grpc_port}"
    finally:
        ready.cancel()
        if process.returncode is None:
            process.terminate()
        await ended


async def measure_quire(url: str, model: str, chats: list[list[dict[str, str]]], max_tokens: int) -> Result:
    """All chats at once, each streamed."""
    body = {
        **{"model": model, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        await stream_chat(client, url, {**body, "messages": chats[0], "max_tokens": 4})
        started = time.perf_counter()
        answers = await asyncio.gather(*(stream_chat(client, url, {**body, "messages": chat}) for chat in chats))
        seconds = time.perf_counter() - started
    return Result(seconds, sum(tokens for _, tokens in answers), [text for text, _ in answers])


async def stream_chat(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[str, int]:
    """The text of one answer, and how many tokens it has."""
    parts: list[str] = []
    tokens = 0
    async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
        if answer.is_error:
            await answer.aread()
            raise SystemExit(f"quire answered {answer.status_code}: {answer.text}")
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if not data.startswith("{"):
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise SystemExit(f"quire broke off: {chunk['error']['message']}")
            parts += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    return "".join(parts), tokens


async def prompt_ids(stub: Any, model: str, chats: list[list[dict[str, str]]]) -> list[list[int]]:
    """The chats as the ids that the model gets, from the router's own tokenizer."""
    requests = [
        inference_pb2.TokenizeRequest(
            model=model, chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in chat])
        )
        for chat in chats
    ]
    return [list((await stub.Tokenize(request)).token_ids) for request in requests]


def measure_transformers(
    path: Path, dtype: str, threads: int, prompts: list[list[int]], max_tokens: int
) -> tuple[float, list[list[int]]]:
    """The seconds and the output ids of all prompts, one after another."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    from transformers.utils.quantization_config import GgufConfig

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.is_file():
        # Dense weights, as Quire has them: packed ones would be unpacked again in each step.
        dense = GgufConfig(dequantize=True)
        source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "quantization_config": dense}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype)).eval()
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
    model.generation_config.eos_token_id = None  # so that nothing ends early
    model.generation_config.pad_token_id = 0

    def generate(ids: list[int], tokens: int) -> list[int]:
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        output = model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        return [int(token) for token in output[0, len(ids) :]]

    with torch.inference_mode():
        generate(prompts[0], 4)
        started = time.perf_counter()
        outputs = [generate(ids, max_tokens) for ids in prompts]
        return time.perf_counter() - started, outputs


async def measure(args: argparse.Namespace) -> tuple[Result, Result]:
    """Quire's result and transformers', which runs while the stack is idle."""
    model = served_name(args.model)
    chats = make_chats(args.requests)
    async with running_stack(args) as (url, address), grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        prompts = await prompt_ids(stub, model, chats)
        ours = await measure_quire(url, model, chats, args.max_tokens)
        seconds, outputs = await asyncio.to_thread(
            measure_transformers, resolve(args.model), args.dtype, args.threads, prompts, args.max_tokens
        )
        texts = [
            (await stub.Detokenize(inference_pb2.DetokenizeRequest(model=model, token_ids=ids))).text for ids in outputs
        ]
    return ours, Result(seconds, sum(map(len, outputs)), texts)


def processor() -> str:
    """The CPU's name, as Linux knows it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def commit() -> str:
    """The commit that is checked out, with a + when files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def report(args: argparse.Namespace, argv: Sequence[str], ours: Result, theirs: Result) -> str:
    """What a reader needs to judge the numbers and to make them again."""
    same = sum(a == b for a, b in zip(ours.answers, theirs.answers, strict=True))
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "grpcio"))
    return "\n".join(
        [
            f"machine       {processor()}, {usable_cores()} cores, {args.threads} threads used",
            f"versions      Quire {commit()}, Python {platform.python_version()}, {packages}",
            f"command       python -m benchmarks.cpu_batching {shlex.join(argv)}",
            f"load          {args.requests} chats of {args.max_tokens} tokens, {served_name(args.model)}, {args.dtype}",
            f"quire         {ours.rate:8.1f} output tok/s  ({ours.tokens} tokens, all at once, {ours.seconds:.1f} s)",
            f"transformers  {theirs.rate:8.1f} output tok/s  ({theirs.tokens} tokens, in turn, {theirs.seconds:.1f} s)",
            f"ratio         {ours.rate / theirs.rate:8.2f}",
            f"same answers  {same} of {args.requests}",
            "",
        ]
    )


def main(argv: Sequence[str]) -> int:
    """Measures both sides in one run and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help="as for quire serve (default %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="default %(default)s")
    parser.add_argument("--requests", type=int, default=16, help="chats at once (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="output of each (default %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="of torch, on both sides (default: all cores)"
    )
    args = parser.parse_args(argv)
    ours, theirs = asyncio.run(measure(args))
    sys.stdout.write(report(args, argv, ours, theirs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

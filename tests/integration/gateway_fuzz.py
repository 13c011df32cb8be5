"""Throws broken and odd bodies at a gateway process by the thousand, and watches its answers and its memory.

    python -m tests.integration.gateway_fuzz --bodies 100000 --seed 1

The router behind it is ``FakeInference``, which answers at once and whose model has any name. A body is a good one with
something odd in it, so that it gets beyond the parser; what, the seed decides.
"""

import argparse
import contextlib
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.doubles.processes import free_port, wait_until
from tests.integration.fake_inference import FakeInference, running_stack

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURNS = [
    {"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]},
    {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "d"},
]  # fmt: skip
COMMON = {
    "model": "m", "temperature": 1, "top_p": 0.5, "stream": False, "stop": ["s"], "n": 1, "seed": 1, "max_tokens": 9,
    "response_format": {"type": "json_schema", "json_schema": {"name": "j", "schema": {"type": "object"}}},
    "logit_bias": {"1": 1},
    "priority": 0, "user": "u", "stream_options": None, "structured_outputs": None, "guided_regex": None,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **COMMON, "messages": TURNS, "tools": [TOOL], "tool_choice": "none", "logprobs": True, "top_logprobs": 2,
        "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low",
    },
    "/v1/completions": {**COMMON, "prompt": ["a", "b"], "logprobs": 2, "echo": False, "best_of": 1, "suffix": None},
    "/v1/responses": {
        "model": "m", "input": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "name": "f"}],
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "stream": False, "top_p": 1,
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "a"}], "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}], "stop_sequences": ["s"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}, "stream": False,
    },
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"model": "m", "messages": TURNS, "tools": [TOOL], "add_generation_prompt": True},
    "/detokenize": {"model": "m", "tokens": [1, 2, 3]},
}  # fmt: skip
SCALARS = (
    None, True, False, 0, 1, -1, 2**31, 2**32, 2**63, 2**64, 2**70, -(2**70), 0.5, -0.0, 1e308, 5e-324, float("nan"),
    float("inf"), "", "a", "text", "user", "auto", "required", "{}", "[", "\x00", "\ud800", "\U0010ffff", "a" * 300,
    "(a+)+$", "{{ 7 * 7 }}", "%s%n", "../../etc/passwd", "'; --",
)  # fmt: skip
# What only our own insides would say.
_INSIDES = re.compile(r"(?i:traceback|\.py\b|pydantic|starlette|grpc)|[A-Z]\w*(Error|Exception)\b|0x[0-9a-f]{8}")
_THREADS = 4


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON, and NaN, which is none."""
    kind = rng.random()
    if depth > 3 or kind < 0.7:
        return rng.choice(SCALARS)
    if kind < 0.85:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = ("role", "content", "type", "text", "name", "schema", "$ref", "pattern", "json", "1", "\udfff")
    return {rng.choice(names): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def spoil(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value with one thing in it changed, added or taken away, at any depth."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        rest = {key: entry for key, entry in value.items() if key != name}
        how = rng.random()
        if how < 0.1:
            return rest
        if how < 0.2:
            return {**value, rng.choice(("x", "", "stream", "n", "\x00")): odd_value(rng)}
        return {**value, name: spoil(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        return [*value[:place], spoil(rng, value[place]), *value[place + 1 :]]
    return odd_value(rng)


def odd_body(rng: random.Random) -> tuple[str, bytes]:
    """A path, and what to send there."""
    path = rng.choice(list(BODIES))
    body: Any = BODIES[path]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body = spoil(rng, body)
    if rng.random() < 0.02:
        levels = rng.randrange(1, 2000)
        return path, b'{"model":' + b"[" * levels + b"]" * levels + b"}"
    raw = json.dumps(body).encode()
    if rng.random() < 0.1:
        raw = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        raw = bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.3 else raw)
    return path, raw


@dataclass
class Outcome:
    """What came of it: answers by status, what should not have come, and resident bytes by how many had been sent."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    resident: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0


@contextlib.contextmanager
def gateway_process(router: str, *flags: str) -> Iterator[tuple[int, int]]:
    """A gateway before that router; gives its process id and its port."""
    port = free_port()
    command = [sys.executable, "-m", "gateway", "--port", str(port), "--router", router, "--log-level", "error", *flags]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: _alive(port))
        yield process.pid, port
        assert process.poll() is None, "the gateway has ended"
    finally:
        process.terminate()
        assert process.wait(30) == 0


def fuzz(bodies: int, seed: int) -> Outcome:
    """Sends so many bodies; looks at the memory after each tenth of them."""
    outcome, lock = Outcome(), threading.Lock()
    began = time.monotonic()
    fake = FakeInference(words=["x", "y"], any_model=True)
    with (
        running_stack(fake) as stack,
        gateway_process(stack.router) as (pid, port),
        ThreadPoolExecutor(_THREADS) as threads,
    ):
        each = bodies // 10 // _THREADS
        for part in range(10):
            seeds = [f"{seed}/{part}/{thread}" for thread in range(_THREADS)]
            list(threads.map(lambda one: _send(port, random.Random(one), each, outcome, lock), seeds))
            fake.requests.clear()
            fake.calls.clear()
            fake.time_left.clear()
            outcome.resident[(part + 1) * each * _THREADS] = _resident(pid)
    outcome.seconds = time.monotonic() - began
    return outcome


def _send(port: int, rng: random.Random, count: int, outcome: Outcome, lock: threading.Lock) -> None:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for _ in range(count):
        path, raw = odd_body(rng)
        client.request("POST", path, raw, {"content-type": "application/json"})
        response = client.getresponse()
        text = response.read().decode("utf-8", "replace")
        with lock:
            outcome.statuses[response.status] += 1
            if fault := _fault(response.status, text):
                outcome.faults.append(f"{fault}: {path} {raw!r} -> {response.status} {text}"[:2000])
    client.close()


def _fault(status: int, text: str) -> str:
    """What is wrong with an answer; empty when nothing is."""
    if status >= 500:
        return "a body is never the server's fault"
    if status != 200:
        error = json.loads(text)["error"]
        if not error["message"] or _INSIDES.search(error["message"]):
            return "it tells of our insides"
    return ""


def _alive(port: int) -> bool:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        client.request("GET", "/livez")
        return client.getresponse().status == 200
    except OSError:
        return False
    finally:
        client.close()


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def main() -> int:
    """Returns the exit status: 1 when an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    outcome = fuzz(args.bodies, args.seed)
    print(f"{sum(outcome.statuses.values())} bodies in {outcome.seconds:.0f} s; by status: {dict(outcome.statuses)}")
    for sent, resident in outcome.resident.items():
        print(f"after {sent:>7}: {resident / 2**20:.1f} MiB resident")
    print(*outcome.faults[:20], sep="\n")
    return bool(outcome.faults)


if __name__ == "__main__":
    sys.exit(main())

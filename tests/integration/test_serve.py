"""The whole stack through the real command: quire serve with the demo model, its clients, and its end."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

from quire.models import DEMO_MODEL, served_name

ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(r"Quire is ready .*: OpenAI API (\S+), gRPC (\S+), model (\S+)")
START_S = 100
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@dataclass
class Server:
    """A running quire serve. Its output is read in the background, so that its pipe never fills."""

    process: subprocess.Popen[str]
    url: str = ""
    grpc_address: str = ""
    model: str = ""
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.log.append(line)
                if match := READY.search(line):
                    self.url, self.grpc_address, self.model = match.groups()
                    self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        return "".join(self.log)

    def until_ready(self) -> "Server":
        assert self._ready.wait(START_S), self.output
        assert self.url, self.output
        return self

    def until_it_says(self, text: str) -> None:
        deadline = time.monotonic() + START_S
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait(self) -> int:
        """The exit status; all output has been read then."""
        status = self.process.wait(60)
        self._reader.join(10)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.wait()

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in tasks.read_text().split()]

    def child(self, package: str) -> int:
        """The process id of ``python -m package``."""
        for pid in self.children():
            if f"-m\0{package}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError(f"no {package} among the launcher's children")


MODEL = os.environ.get("QUIRE_TEST_MODEL", DEMO_MODEL)


def start(*flags: str) -> Server:
    """Starts quire serve on free ports; returns at once."""
    ports = ["--port", "0", "--grpc-port", "0", "--worker-port", "0"]
    # A short first step keeps the start short.
    size = ["--max-model-len", "1024", "--max-num-batched-tokens", "128"]
    command = [sys.executable, "-m", "quire", "serve", "--model", MODEL, *ports, *size, *flags]
    return Server(
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two workers, for the tests that only ask."""
    server = start("--workers", "2")
    try:
        yield server.until_ready()
    finally:
        server.close()


@pytest.fixture
def launch() -> Iterator[Callable[..., Server]]:
    """Starts servers that a test ends as it likes; those it leaves are ended after it."""
    servers: list[Server] = []

    def launch(*flags: str) -> Server:
        servers.append(start(*flags))
        return servers[-1]

    yield launch
    for server in servers:
        server.close()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


def test_the_model_keeps_its_short_name(server: Server, client: openai.OpenAI) -> None:
    name = served_name(MODEL)
    assert server.model == name
    assert [model.id for model in client.models.list()] == [name]


def test_an_answer_makes_sense_and_streams_as_the_same_text(server: Server, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=server.model, messages=QUESTION, temperature=0, max_tokens=24)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    chunks = client.chat.completions.create(
        model=server.model, messages=QUESTION, temperature=0, max_tokens=24, stream=True
    )
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 3


def test_its_metrics_show_the_worker_too(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model=server.model, prompt="The sea is", max_tokens=2)
    deadline = time.monotonic() + 10  # workers report now and then
    while True:
        text = httpx.get(server.url.removesuffix("/v1") + "/metrics", trust_env=False).text
        figures: Counter[str] = Counter()  # of both workers: which of them a prompt goes to is the router's affair
        for line in text.splitlines():
            if "{worker=" in line:
                figures[line.split("{")[0]] += float(line.split()[-1])
        if figures["quire_worker_prefix_cache_queries_total"] > 2 or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert figures["quire_worker_ready"] == 2
    assert figures["quire_worker_prefix_cache_queries_total"] > 2
    assert figures["quire_worker_kv_blocks_free"] + figures["quire_worker_kv_blocks_cached"] > 0
    phases = dict(re.findall(r'^quire_worker_start_seconds{phase="([^"]+)",.*} (.*)$', text, re.MULTILINE))
    assert {"imports", "weights", "warm-up"} <= set(phases)
    assert 0 < sum(map(float, phases.values())) < START_S
    assert "\nquire_router_num_requests_waiting 0.0\n" in text


def test_clients_write_no_lines_of_the_log(server: Server) -> None:
    grammar = "x\r1999-12-31 07:00:00,000 ERROR router forged\x1b[2J\n1999-12-31 07:00:00,000 ERROR router forged"
    body = {"model": server.model, "prompt": "The sea", "structured_outputs": {"grammar": grammar}}
    assert httpx.post(f"{server.url}/completions", json=body, trust_env=False, timeout=60).status_code == 400
    server.until_it_says("ERROR router forged")
    assert not re.search(r"^\w*\s*\d*\s*\|? ?1999-12-31 07", server.output, re.MULTILINE)
    assert "\x1b" not in server.output


def test_many_at_once_get_what_each_gets_alone(server: Server) -> None:
    prompts = [f"Count from {n} to {n + 5}:" for n in range(8)]
    body = {"model": server.model, "temperature": 0, "max_tokens": 12}
    url = f"{server.url}/completions"
    with httpx.Client(timeout=60, trust_env=False) as client:
        alone = [client.post(url, json={**body, "prompt": prompt}).json()["choices"][0]["text"] for prompt in prompts]
        together = client.post(url, json={**body, "prompt": prompts}).json()["choices"]
    assert [choice["text"] for choice in sorted(together, key=lambda choice: choice["index"])] == alone


def test_the_documented_grpc_client_works(server: Server) -> None:
    command = [sys.executable, "docs/grpc_client.py", "--address", server.grpc_address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "[FINISH_REASON_" in done.stdout


def test_the_chat_command_talks_to_it(server: Server) -> None:
    command = [sys.executable, "-m", "quire", "chat", "--url", server.url, "--system", "Answer with one word."]
    done = subprocess.run(
        command, cwd=ROOT, input="What is the capital of France?\n/exit\n", capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_taken_port_is_refused_before_anything_starts(server: Server, launch: Callable[..., Server]) -> None:
    port = server.url.rsplit(":", 1)[1].removesuffix("/v1")
    second = launch("--port", port)
    assert second.wait() == 1
    assert f"port {port}" in second.output
    assert "starting" not in second.output
    assert httpx.get(f"{server.url}/models", trust_env=False).status_code == 200


def test_what_the_worker_does_not_support_ends_in_its_own_words(launch: Callable[..., Server]) -> None:
    server = launch("--tensor-parallel-size", "4", "--quantization", "gptq")
    assert server.wait() == 1
    assert "--quantization gptq is not supported" in server.log[-1]


def test_ctrl_c_ends_everything_cleanly(launch: Callable[..., Server]) -> None:
    server = launch("--load-format", "dummy").until_ready()
    children = server.children()
    assert len(children) == 3
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0, server.output
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_sigterm_during_the_start_ends_it_cleanly(launch: Callable[..., Server]) -> None:
    server = launch()
    server.until_it_says("starting worker 0")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0, server.output
    assert "stopped" in server.log[-1]


def test_when_a_worker_dies_all_end_and_it_is_named(launch: Callable[..., Server]) -> None:
    server = launch("--load-format", "dummy").until_ready()
    children = server.children()
    os.kill(server.child("worker"), signal.SIGKILL)
    assert server.wait() == 1
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert "quire: worker 0 was killed by SIGKILL" in server.output


@pytest.mark.parametrize("stream", [True, False])
def test_when_the_only_worker_dies_clients_hear_of_it_at_once(launch: Callable[..., Server], stream: bool) -> None:
    server = launch("--load-format", "dummy", "--shutdown-timeout", "60").until_ready()
    worker = server.child("worker")
    threading.Timer(1.0, os.kill, (worker, signal.SIGKILL)).start()
    body = {"model": server.model, "prompt": "The sea", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    began = time.monotonic()
    response = httpx.post(f"{server.url}/completions", json=body, trust_env=False, timeout=60)
    assert response.status_code == (200 if stream else 503)
    error = response.text.rstrip().rpartition("data: ")[2] if stream else response.text
    assert json.loads(error)["error"]["type"] == "server_error"
    assert server.wait() == 1
    assert time.monotonic() - began < 20
    assert "quire: worker 0 was killed by SIGKILL" in server.output


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_nothing_outlives_a_killed_launcher(launch: Callable[..., Server]) -> None:
    server = launch("--load-format", "dummy").until_ready()
    handles = [os.pidfd_open(pid) for pid in server.children()]
    assert len(handles) == 3
    server.process.kill()
    for handle in handles:
        with os.fdopen(handle, "rb", buffering=0) as process:
            assert select.select([process], [], [], 10)[0], "a process outlived its launcher"

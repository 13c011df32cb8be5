"""Several gateway processes on one port: who serves, what they count together, how they end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.doubles.processes import free_port, wait_until
from tests.integration.fake_inference import MODEL, FakeInference, running_stack

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference()) as stack:
        yield stack


@pytest.fixture
def fake(stack):
    stack.fake.reset()
    return stack.fake


class Gateway:
    def __init__(self, router, port=0):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "gateway", "--router", router, "--port", str(self.port), "--processes", "2"]
        self.owner = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def until_ready(self):
        """All of them: a connection may be anyone's."""
        wait_until(lambda: len(self.children()) == 2)
        for _ in range(20):
            wait_until(self.healthy)
        return self

    def healthy(self):
        try:
            return httpx.get(f"{self.url}/health", timeout=20).status_code == 200
        except httpx.TransportError:
            return False

    def children(self):
        return [int(pid) for pid in Path(f"/proc/{self.owner.pid}/task/{self.owner.pid}/children").read_text().split()]

    def end(self, number=signal.SIGTERM):
        self.owner.send_signal(number)
        return self.owner.wait(30)


@pytest.fixture
def gateway(stack):
    gateway = Gateway(stack.router).until_ready()
    yield gateway
    if gateway.owner.poll() is None:
        assert gateway.end() == 0
    gateway.owner.stderr.close()


def test_figures_are_those_of_all(stack, gateway, fake):
    fake.gates = [threading.Event()]
    with ThreadPoolExecutor(24) as threads:
        asked = [
            threads.submit(httpx.post, f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": True})
            for _ in range(24)
        ]
        wait_until(lambda: len(fake.requests) == 24)
        # Each of these connections may be another process's.
        for _ in range(10):
            assert httpx.get(f"{gateway.url}/load").json() == {"server_load": 24}
        fake.gates[0].set()
        assert {reply.result().status_code for reply in asked} == {200}
    for _ in range(10):
        text = httpx.get(f"{gateway.url}/metrics").text
        assert float(re.search(r"^quire_num_requests_running (\S+)$", text, re.MULTILINE)[1]) == 0
        assert float(re.search(r'^quire_request_success_total\{.*"length".*\} (\S+)$', text, re.MULTILINE)[1]) == 24
        assert float(re.search(r"^quire_time_to_first_token_seconds_count (\S+)$", text, re.MULTILINE)[1]) == 24
        assert "pid=" not in text
    port = int(stack.router.rpartition(":")[2])
    assert all(_is_connected_to(port, pid) for pid in gateway.children()), "all of them have served"


def _is_connected_to(port, pid):
    """Whether a process has a connection to the router, which it makes when it is first needed."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    inodes = {fields[9] for fields in sockets if int(fields[2].partition(":")[2], 16) == port}
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    return any(f"socket:[{inode}]" in links for inode in inodes)


def test_what_runs_may_end(gateway, fake):
    fake.delay_token = 0.2
    with (
        httpx.Client() as client,
        client.stream(
            "POST", f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 8}
        ) as reply,
    ):
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        gateway.owner.terminate()
        assert list(lines)[-2] == "data: [DONE]"
    assert gateway.owner.wait(30) == 0
    assert not gateway.healthy()


def test_one_that_ends_ends_all(gateway):
    victim, *others = gateway.children()
    os.kill(victim, signal.SIGKILL)
    assert gateway.owner.wait(30) == 1
    assert f"process {victim} ended with status -9" in gateway.owner.stderr.read()
    assert not any(Path(f"/proc/{pid}").exists() for pid in others)


def test_none_outlives_its_owner(gateway):
    children = gateway.children()
    assert gateway.end(signal.SIGKILL) == -9
    wait_until(lambda: not any(_runs(pid) for pid in children), seconds=10)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_port_that_others_share_is_not_taken(gateway, stack):
    second = Gateway(stack.router, gateway.port)
    assert second.owner.wait(30) == 1
    assert "choose another --port" in second.owner.stderr.read()
    second.owner.stderr.close()


def test_a_second_signal_ends_them_at_once(gateway, fake):
    fake.delay_start = 60
    thread = threading.Thread(target=_ask_quietly, args=(gateway.url,))
    thread.start()
    wait_until(lambda: fake.requests)
    gateway.owner.terminate()
    time.sleep(0.5)
    assert gateway.end() == 130
    thread.join(20)


def _ask_quietly(url):
    with contextlib.suppress(httpx.TransportError):
        httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=70)

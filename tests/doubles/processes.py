"""The three processes, started one by one, so that a test can end and restart each."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for a condition. Raises AssertionError when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


class Stack:
    """A worker, a router and a gateway over one model.

    Args:
        model: folder or GGUF file.
        worker_flags: beside model and port.
        router_flags: beside model, port and worker.
        gateway_flags: beside port and router.
    """

    # A short first step keeps the start short.
    _SIZE = ("--max-num-batched-tokens", "128")

    def __init__(
        self, model: Path, *worker_flags: str, router_flags: Sequence[str] = (), gateway_flags: Sequence[str] = ()
    ) -> None:
        self._model = str(model)
        self._router_flags = router_flags
        self._gateway_flags = gateway_flags
        self._worker_flags = (*self._SIZE, *worker_flags)
        self.worker_port, self.router_port, self.gateway_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.gateway_port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_worker(self) -> None:
        self._start("worker", "--model", self._model, "--port", str(self.worker_port), *self._worker_flags)

    def start(self) -> None:
        """Starts all three and waits until the gateway says that it is healthy."""
        self.start_worker()
        self._start(
            "router", "--model", self._model, "--port", str(self.router_port),
            "--worker-urls", f"127.0.0.1:{self.worker_port}", "--served-model-name", "model",
            *self._router_flags,
        )  # fmt: skip
        self._start(
            "gateway", "--port", str(self.gateway_port), "--router", f"127.0.0.1:{self.router_port}",
            *self._gateway_flags,
        )  # fmt: skip
        wait_until(self.healthy)

    def _start(self, module: str, *flags: str) -> None:
        # The worker is to leave a core to the others and to the test.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", module, *flags, "--log-level", "warning"]
        self.processes[module] = subprocess.Popen(command, env=environment)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self, module: str) -> None:
        """SIGKILL: the process has no say in it."""
        self.processes[module].send_signal(signal.SIGKILL)
        self.processes[module].wait()

    def close(self) -> dict[str, int]:
        """Ends what runs, front to back, and returns the exit statuses."""
        statuses = {}
        for module in ("gateway", "router", "worker"):
            if module in self.processes:
                self.processes[module].terminate()
                statuses[module] = self.processes[module].wait(30)
        return statuses

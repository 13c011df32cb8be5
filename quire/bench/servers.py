"""``quire serve`` as a process of its own, from its start to its end."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType

from quire.plan import child_environment

STARTUP_S = 900.0
_END_S = 60.0
_READY = re.compile(r"Quire is ready .*: OpenAI API \w+://([^/]+)/v1, gRPC (\S+), model (.+)")


class Servers:
    """Worker, router and gateway under ``quire serve``, as long as this context lasts; on free ports unless told.

    Args:
        flags: of ``quire serve``, the model among them.
        environment: added to this process's own.

    Attributes:
        http, grpc, name: the addresses, host:port, and what the model is called; known once they are ready.
        started, ready: when the process was started, and when it said that it is ready, in seconds of
            ``time.monotonic``.
        lines: what it printed, with the time of each line; the last 1,000.
    """

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.http = self.grpc = self.name = ""
        self.lines: deque[tuple[float, str]] = deque(maxlen=1000)
        self._decided = threading.Event()
        ports = ("--port", "0", "--grpc-port", "0", "--worker-port", "0", "--startup-timeout", str(STARTUP_S))
        # Tied to this process, so that nothing outlives it; in a group of its own, as Ctrl-C is for this process alone.
        tied = (sys.executable, "-m", "quire.tied", str(os.getpid()), "quire")
        self.ready = self.started = time.monotonic()
        self._process = subprocess.Popen(
            [*tied, "serve", *ports, *flags],
            env={**child_environment(os.environ), **(environment or {})}, process_group=0,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="output of quire serve", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                now = time.monotonic()
                self.lines.append((now, line.rstrip()))
                if match := _READY.match(line):
                    self.http, self.grpc, self.name = match.groups()
                    self.ready = now
                    self._decided.set()
        self._decided.set()  # it has ended

    def __enter__(self) -> "Servers":
        """Waits until they are ready. Raises RuntimeError, with what was printed last, when they do not get there."""
        try:
            self._decided.wait(STARTUP_S)
        except BaseException:
            self._end()
            raise
        if not self.name:
            self._end()
            printed = "\n".join(line for _, line in list(self.lines)[-40:])
            raise RuntimeError(f"quire serve did not become ready; it printed:\n{printed}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1.0)

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the worker's start, as its log tells them."""
        found: dict[str, float] = {}
        for _, line in list(self.lines):
            if match := re.search(r"start-up: (.+) took ([0-9.]+) s$", line):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def tiers(self) -> dict[str, float]:
        """Seconds from the start until each kind of process was ready, by the launcher's own account."""
        said = "\n".join(line for _, line in list(self.lines))
        return {name: float(seconds) for name, seconds in re.findall(r"\| (\w[\w, ]*) ready after ([0-9.]+) s", said)}

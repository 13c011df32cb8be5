"""``quire serve`` as a process of its own, and model folders that it can serve without a checkpoint's weights."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.doubles.processes import free_port

NAME = "model"  # what the model is called over the wire
_HERE = Path(__file__).resolve().parents[2]
_STARTUP_S = 900.0
_END_S = 60.0


def servable(model: Path, folder: Path) -> tuple[Path, str | None]:
    """The model as servers take it, and the --load-format that it needs, if any.

    A folder without weights gets random ones. One without a tokenizer is copied into ``folder`` with a made-up one:
    token 5 is " 5", so that a text tells its ids.
    """
    if model.is_file():
        return model, None
    load_format = None if list(model.glob("*.safetensors")) else "dummy"
    if not (model / "tokenizer.json").exists():
        copy = folder / model.name
        copy.mkdir()
        for path in (*model.glob("*.json"), *model.glob("*.safetensors")):
            (copy / path.name).symlink_to(path.resolve())
        _save_tokenizer(copy, json.loads((model / "config.json").read_text())["vocab_size"])
        model = copy
    return model, load_format


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    vocabulary = {f"Ġ{token_id}": token_id for token_id in range(vocab_size - 1)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<end>", normalized=False, special=True)])
    core.save(str(folder / "tokenizer.json"))


class Servers:
    """Worker, router and gateway under ``quire serve``, from the start of the process to its end.

    Args:
        model: a folder or .gguf file.
        flags: of ``quire serve``, beside the model and the ports.
        environment: added to this process's own.

    Attributes:
        grpc, http: the addresses.
        started: when the process was started, in seconds of ``time.monotonic``.
        lines: what it printed, with the time of each line; the last 1,000.
    """

    def __init__(self, model: Path, flags: list[str], environment: Mapping[str, str] | None = None) -> None:
        http, grpc = free_port(), free_port()
        self.http, self.grpc = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self.lines: deque[tuple[float, str]] = deque(maxlen=1000)
        self._ready = threading.Event()
        command = [
            sys.executable, "-m", "quire", "serve", "--model", str(model), "--served-model-name", NAME,
            "--port", str(http), "--grpc-port", str(grpc), "--startup-timeout", str(_STARTUP_S), *flags,
        ]  # fmt: skip
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            command, cwd=_HERE, env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, name="output of quire serve", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))
            if line.startswith("Quire is ready"):
                self._ready.set()
        self._ready.set()  # it has ended

    def __enter__(self) -> "Servers":
        """Waits until they are ready. Raises RuntimeError, with what was printed last, when they do not get there."""
        if not self._ready.wait(_STARTUP_S) or self._process.poll() is not None:
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

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the worker's start, as its log tells them."""
        found: dict[str, float] = {}
        for _, line in self.lines:
            if match := re.search(r"start-up: (.+) took ([0-9.]+) s$", line):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

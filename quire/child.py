"""One process that the launcher started and therefore owns: its output, its end."""

import asyncio
import codecs
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence

_TAIL_LINES = 20
_LINE_LIMIT = 8192
_READ_BYTES = 65536
# After the process's end, a grandchild may still hold the other end of the pipe.
_DRAIN_S = 1.0
# Progress bars rewrite their line with a carriage return; each state is a line here.
_LINE_END = re.compile(r"\r\n|\n|\r")


class Child:
    """A running process. Its output goes line by line to ``show``; the last lines are kept in ``tail``."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, show: Callable[[str, str], None]) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = process
        self._show = show
        self._pump = asyncio.create_task(self._read_output(), name=f"output of {name}")
        # Done when the process has ended and its output was shown; the result is its status, negative for a signal.
        self.end: asyncio.Task[int] = asyncio.create_task(self._watch(), name=f"end of {name}")

    @classmethod
    async def start(
        cls,
        name: str,
        package: str,
        args: Sequence[str],
        environment: Mapping[str, str],
        show: Callable[[str, str], None],
    ) -> "Child":
        """Starts ``python -m package args`` so that it ends with this process. Raises OSError when that fails."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quire.tied", str(os.getpid()), package, *args),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            process_group=0,  # Ctrl-C in the terminal is for the launcher alone
        )
        return cls(name, process, show)

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.returncode is None

    def terminate(self) -> None:
        """Asks the process for a clean end."""
        if self.running:
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process and what it may have started, at once."""
        if self.running:
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _watch(self) -> int:
        status = await self._process.wait()
        await asyncio.wait([self._pump], timeout=_DRAIN_S)
        self._pump.cancel()
        return status

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        rest = ""
        while data := await self._process.stdout.read(_READ_BYTES):
            *lines, rest = _LINE_END.split(rest + decoder.decode(data))
            for line in lines:
                self._take(line)
            if len(rest) > _LINE_LIMIT:
                self._take(rest)
                rest = ""
        self._take(rest + decoder.decode(b"", final=True))

    def _take(self, line: str) -> None:
        if line.strip():
            line = line[:_LINE_LIMIT]
            self.tail.append(line)
            self._show(self.name, line)


def describe_status(status: int) -> str:
    """What an exit status says, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")

"""What ``quire serve`` shows a person: its own phases and its processes' lines, each with the name it came from."""

import re
import sys
from collections.abc import Sequence
from typing import TextIO

_COLOURS = {"worker": "36", "router": "35", "gateway": "34", "quire": "1"}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Console:
    """Writes lines with a prefix to standard error, coloured only on a terminal."""

    def __init__(self, names: Sequence[str], stream: TextIO | None = None) -> None:
        """``names`` are those of the processes; prefixes are as wide as the longest."""
        self._stream = stream or sys.stderr
        self._width = max(map(len, ["quire", *names]))
        self._colour = self._stream.isatty()

    def line(self, name: str, text: str) -> None:
        """Shows one line of the process called ``name``."""
        prefix = f"{name:<{self._width}} |"
        if self._colour:
            prefix = f"\x1b[{_COLOURS[name.split()[0]]}m{prefix}\x1b[0m"
        else:
            text = _ESCAPES.sub("", text)
        self._write(f"{prefix} {text}\n")

    def say(self, text: str) -> None:
        """Shows a line of the launcher itself."""
        self.line("quire", text)

    def failure(self, text: str, last_lines: Sequence[str] = ()) -> None:
        """Shows why the launcher ends, apart from all other lines."""
        message = f"quire: {text}"
        if self._colour:
            message = f"\x1b[1;31m{message}\x1b[0m"
        self._write("\n".join(["", message, *(f"    {line}" for line in last_lines), ""]))

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal or the pipe is gone; that alone is no reason to stop serving
            pass

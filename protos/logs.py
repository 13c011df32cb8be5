"""How every process writes its log: one line a record, whatever clients have put into it."""

import argparse
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")


def add_log_arguments(group: "argparse._ArgumentGroup") -> None:
    """Adds ``--log-level`` and ``--log-format``."""
    group.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"),
        help="least severe messages that are logged (default %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--log-format", default="text", choices=FORMATS,
        help="text, or json: one object a line (default %(default)s)",
    )  # fmt: skip


def log_to_stderr(level: str, name: str, form: str = "text") -> None:
    """Logs to standard error what is of ``level`` (``info``, ...) or above, as said by the process called ``name``.

    ``form`` is one of ``FORMATS``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(name) if form == "json" else LogFormatter(name))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class LogFormatter(logging.Formatter):
    """Escapes what is not printable, so that no text can end its line, begin another, or speak to a terminal.

    Tracebacks have lines of their own, all of them indented: none looks like a record.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {name} %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's line."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: object) -> str:
        """A traceback, with the exceptions' texts."""
        return _indented(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:
        """Where a record was made."""
        return _indented(stack_info)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII. What records carry as ``trace_id`` is a field of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """The record's line."""
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace_id := getattr(record, "trace_id", ""):
            told["trace_id"] = trace_id
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            told["stack"] = record.stack_info
        return json.dumps(told)


def printable(text: str) -> str:
    """The text with what is not printable as escapes: line ends, control characters, marks of direction."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _indented(text: str) -> str:
    return "\n".join(f"    {printable(line)}" for line in text.split("\n"))

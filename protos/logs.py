"""How every process writes its log: one line a record, whatever clients have put into it."""

import logging
import sys


def log_to_stderr(level: str, name: str) -> None:
    """Logs to standard error what is of ``level`` (``info``, ...) or above, as said by the process called ``name``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(name))
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


def printable(text: str) -> str:
    """The text with what is not printable as escapes: line ends, control characters, marks of direction."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _indented(text: str) -> str:
    return "\n".join(f"    {printable(line)}" for line in text.split("\n"))

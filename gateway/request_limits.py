"""Limits on what one request may ask: settings with a flag each. Knows only the standard library."""

import argparse
from dataclasses import dataclass, field, fields
from typing import Any


def _limit(default: int, most: int, what: str) -> Any:
    return field(default=default, metadata={"most": most, "what": what})


@dataclass(frozen=True)
class RequestLimits:
    """Every field is a flag of its name, and at least 1; the metadata has the highest value that is of use."""

    max_body_bytes: int = _limit(4 * 1024 * 1024, 2**40, "bytes of a request's body; a longer one is 413")
    max_header_bytes: int = _limit(32 * 1024, 2**30, "bytes of a request's headers; longer ones are 431")
    header_timeout: int = _limit(30, 3600, "seconds for a request's headers to come; then the connection is closed")
    body_timeout: int = _limit(60, 3600, "seconds for a request's body to come; then it is 408")
    max_json_depth: int = _limit(64, 128, "levels of objects and lists within each other in a body")
    max_messages: int = _limit(4096, 2**20, "messages of a conversation")
    max_tools: int = _limit(128, 1024, "tools of a request")
    max_stop_strings: int = _limit(16, 16, "stop strings of a request")
    max_n: int = _limit(8, 8, "choices for each prompt")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "RequestLimits":
        """Takes the limits out of parsed flags."""
        return cls(**{limit.name: getattr(args, limit.name) for limit in fields(cls)})

    def fault(self) -> str:
        """What is wrong with a limit; empty when nothing is."""
        for limit in fields(self):
            value, most = getattr(self, limit.name), limit.metadata["most"]
            if not 1 <= value <= most:
                return f"{flag_of(limit.name)} is {value}; it must be 1 to {most}"
        return ""


def flag_of(name: str) -> str:
    """The flag of a limit."""
    return "--" + name.replace("_", "-")


def add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the flags."""
    for limit in fields(RequestLimits):
        group.add_argument(
            flag_of(limit.name), type=int, default=limit.default, metavar="N",
            help=f"most {limit.metadata['what']} (default %(default)s)",
        )  # fmt: skip

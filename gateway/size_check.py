"""Holds bodies to the limits of this server that are settings."""

from collections.abc import Sequence
from typing import Any

from gateway.errors import invalid
from gateway.request_limits import RequestLimits, flag_of
from gateway.schema import ChatBody, CompletionBody, GenerateBody, TokenizeBody


def check_sizes(body: GenerateBody | TokenizeBody, limits: RequestLimits) -> None:
    """Raises ApiError (400) that names the field and the limit when a body has too many of something."""
    if isinstance(body, ChatBody | TokenizeBody):
        _check("messages", body.messages, "max_messages", limits)
        _check("tools", body.tools, "max_tools", limits)
    if isinstance(body, ChatBody | CompletionBody):
        _check("stop", [] if isinstance(body.stop, str) else body.stop, "max_stop_strings", limits)
        if body.n is not None and body.n > limits.max_n:
            raise invalid("n", f"n is {body.n}; this server takes at most {limits.max_n} ({flag_of('max_n')})")


def _check(param: str, entries: Sequence[Any] | None, name: str, limits: RequestLimits) -> None:
    count, most = len(entries or ()), getattr(limits, name)
    if count > most:
        raise invalid(param, f"{param} has {count} entries; this server takes at most {most} ({flag_of(name)})")


def check_depth(raw: bytes, parsed: Any, most: int) -> None:
    """Raises ApiError (400) when a body is nested more than ``most`` levels deep; ``raw`` is its JSON."""
    # Few brackets cannot be deep; counting them takes no time.
    if raw.count(b"{") + raw.count(b"[") <= most:
        return
    level = _containers([parsed])
    for _ in range(most):
        level = [inner for value in level for inner in _containers(value)]
        if not level:
            return
    if level:
        raise invalid(None, f"The body is nested more than {most} levels deep ({flag_of('max_json_depth')}).")


def _containers(value: Any) -> list[Any]:
    """What is right within a list or an object and has an inside of its own."""
    return [entry for entry in (value.values() if isinstance(value, dict) else value) if isinstance(entry, dict | list)]

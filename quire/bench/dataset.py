"""Requests from a file: one JSON object a line, or one array of them.

An object is one of
    {"prompt": TEXT or TOKEN IDS, "max_tokens": 128}
    {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 128}
    {"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", "value": TEXT}]}    as ShareGPT has them
    {"custom_id": NAME, "method": "POST", "url": "/v1/chat/completions", "body": {...}}      a line of OpenAI's batches
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.bench.records import Job, Prompt

OUTPUT_LEN = 256
# Characters of a reply that count as a token of output, where a file has replies but no lengths.
_CHARACTERS_A_TOKEN = 4
# What a request has of its own accord.
_SET_HERE = {"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "prompt", "messages"}
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class DatasetError(ValueError):
    """A file cannot be used; the message names it, the line, and what is wrong there."""


def read_dataset(path: Path, output_len: int | None = None) -> list[Job]:
    """All requests of a file, in order.

    Args:
        path: JSON lines, or a JSON array.
        output_len: the longest output of all of them; None: as each says, else by its reply, else ``OUTPUT_LEN``.

    Raises:
        DatasetError: the file cannot be read, or one of its objects is no request.
    """
    jobs = []
    for where, value in _objects(path):
        try:
            jobs.append(_job(value, output_len, where))
        except ValueError as error:
            raise DatasetError(f"{where}: {error}") from error
    if not jobs:
        raise DatasetError(f"{path} has no requests")
    return jobs


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    """Each object with where it stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"--dataset {path}: {error}") from error
    if text.lstrip().startswith("["):
        try:
            yield from ((f"{path}, item {number}", value) for number, value in enumerate(json.loads(text)))
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path}:{error.lineno}: {error.msg}") from error
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise DatasetError(f"{path}:{number}: {error.msg} (column {error.colno})") from error


def _job(value: Any, output_len: int | None, where: str) -> Job:
    """Raises ValueError, which says what is wrong."""
    if not isinstance(value, dict):
        raise ValueError(f"wanted an object, found {json.dumps(value)[:60]}")
    if "conversations" in value:
        messages, reply = _conversation(value["conversations"])
        by_reply = max(1, len(reply) // _CHARACTERS_A_TOKEN) if reply else OUTPUT_LEN
        return Job(messages, output_len or by_reply, source=where)
    body = value.get("body", value)
    if not isinstance(body, dict):
        raise ValueError("'body' must be an object")
    if "messages" in body:
        prompt: Prompt = _messages(body["messages"])
    elif "prompt" in body:
        prompt = _prompt(body["prompt"])
    else:
        raise ValueError("it has none of 'prompt', 'messages', 'conversations' and 'body'")
    own = body.get("max_tokens", body.get("max_completion_tokens", OUTPUT_LEN))
    if not isinstance(own, int) or isinstance(own, bool) or own < 1:
        raise ValueError(f"'max_tokens' is {own!r}; it must be a whole number of at least 1")
    # Only a batch's body is a request as it stands; elsewhere people keep all sorts of things beside the prompt.
    fields = {name: field for name, field in body.items() if name not in _SET_HERE} if "body" in value else {}
    return Job(prompt, output_len or own, fields=fields, source=where)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token_id) is int and token_id >= 0 for token_id in value):
        return value
    raise ValueError("'prompt' must be a text or a list of token ids, and not empty")


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError("'messages' must be a list, and not empty")
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"'messages[{place}]' must be an object with 'role' and 'content'")
    return value


def _conversation(value: Any) -> tuple[list[dict[str, Any]], str]:
    """The messages up to the first of a person, and the reply to it; empty: there is none."""
    if not isinstance(value, list):
        raise ValueError("'conversations' must be a list")
    messages: list[dict[str, Any]] = []
    for place, turn in enumerate(value):
        said = turn.get("value") if isinstance(turn, dict) else None
        role = _ROLES.get(turn.get("from", "")) if isinstance(turn, dict) else None
        if not isinstance(said, str) or role is None:
            raise ValueError(f"'conversations[{place}]' must have a 'value' and 'from' one of {', '.join(_ROLES)}")
        if role == "assistant" and messages and messages[-1]["role"] == "user":
            return messages, said
        if role != "assistant":
            messages.append({"role": role, "content": said})
        if len(messages) > 1 and role == messages[-2]["role"] == "user":
            return messages[:-1], ""
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("'conversations' has no turn from human")
    return messages, ""

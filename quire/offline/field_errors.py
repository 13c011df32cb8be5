"""Errors of the offline API: ValueErrors that name what the caller wrote, not a flag or a field of a message."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import InvalidArgument

# The wire's name of a field, and the caller's.
_NAMES = (
    ("chat.messages", "messages"),
    ("chat", "messages"),
    ("token_ids.ids", "prompt_token_ids"),
    ("token_ids", "prompt_token_ids"),
    ("text", "prompt"),
    ("sampling.json_schema", "structured_outputs.json"),
    ("sampling.choices.texts", "structured_outputs.choice"),
    ("sampling.choices", "structured_outputs.choice"),
    *((f"sampling.{name}", f"structured_outputs.{name}") for name in ("regex", "grammar", "json_object")),
    ("sampling.", ""),
    ("stopping.", ""),
    ("output.", ""),
)
_FLAG = re.compile(r"--([a-z][a-z-]*[a-z])")


@contextmanager
def naming_fields() -> Iterator[None]:
    """Turns InvalidArgument into a ValueError whose message names the field."""
    try:
        yield
    except InvalidArgument as error:
        field, message = error.field, str(error)
        for wire, ours in _NAMES:
            if field.startswith(wire):
                field = ours + field.removeprefix(wire)
                break
        named = message if not field or message.startswith(field) else f"{field}: {message}"
        raise ValueError(without_flags(named)) from error


def without_flags(message: str) -> str:
    """A message about flags of the command line, as one about arguments: ``--block-size`` is ``block_size``."""
    return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), message)

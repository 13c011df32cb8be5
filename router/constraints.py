"""What an output must be: shape and size of what the client sent. Whether it can be followed, the worker finds out."""

import json
from collections.abc import Mapping

from protos import sampling_pb2
from router.errors import InvalidArgument

# Characters of a constraint, by its field; of choices, together.
MAX_CHARS = {"json_schema": 128 * 1024, "regex": 16 * 1024, "grammar": 32 * 1024, "choices": 64 * 1024}
MAX_CHOICES = 1024

Constraint = Mapping[str, str | bool | sampling_pb2.Choices]
"""A field of the oneof ``SamplingParams.constraint``, by its name; or nothing."""


def check_constraint(sampling: sampling_pb2.SamplingParams) -> Constraint:
    """The constraint of a request, to be passed on as it is. Raises InvalidArgument."""
    kind = sampling.WhichOneof("constraint")
    if kind is None:
        return {}
    value: str | bool | sampling_pb2.Choices = getattr(sampling, kind)
    if isinstance(value, bool):
        if not value:
            raise InvalidArgument(f"sampling.{kind}", f"{kind} is false; leave it out")
    elif isinstance(value, str):
        _check_length(kind, len(value))
        if kind == "json_schema":
            _check_schema(value)
    else:
        _check_choices(value)
    return {kind: value}


def _check_length(kind: str, length: int) -> None:
    if not 1 <= length <= MAX_CHARS[kind]:
        message = f"{kind} has {length} characters; it must have 1 to {MAX_CHARS[kind]}"
        raise InvalidArgument(f"sampling.{kind}", message)


def _check_schema(text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument("sampling.json_schema", f"json_schema is not JSON: {reason}") from error
    if not is_object:
        raise InvalidArgument("sampling.json_schema", "json_schema must be a JSON object")


def _check_choices(choices: sampling_pb2.Choices) -> None:
    field = "sampling.choices"
    if not 1 <= len(choices.texts) <= MAX_CHOICES:
        raise InvalidArgument(field, f"choices has {len(choices.texts)} texts; it must have 1 to {MAX_CHOICES}")
    for index, text in enumerate(choices.texts):
        if not text:
            raise InvalidArgument(f"{field}.texts[{index}]", "a choice is empty; it must have at least one character")
    _check_length("choices", sum(map(len, choices.texts)))

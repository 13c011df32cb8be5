"""Looks at a complete output before its last chunk is sent: does it keep to what the request said it must be?

The grammar has made it so; that it did is worth a look, since clients act on it. JSON and choices are checked; for
regular expressions and other grammars only the worker's automaton knows.
"""

import json
from typing import Any

from jsonschema_rs import RegexOptions, ValidationError, validator_for

from gateway.constraint import Constraint
from gateway.errors import SERVER_ERROR, ApiError, invalid

# Bytes of one compiled pattern: a client's schema must not take our memory.
_MAX_PATTERN_BYTES = 1024 * 1024


class SchemaCheck:
    """Whether texts are JSON that fits a schema. Reads nothing but the schema, and matches patterns in linear time.

    Raises:
        ApiError (400): the schema is none; ``param`` says where it stands.
    """

    def __init__(self, schema: Any, param: str) -> None:
        try:
            self._validator = validator_for(
                schema, offline=True, pattern_options=RegexOptions(size_limit=_MAX_PATTERN_BYTES)
            )
        except (ValueError, RecursionError) as error:
            raise invalid(param, f"{param} is no valid JSON schema: {_reason(error)[:400]}") from None

    def fault(self, text: str) -> str:
        """What is wrong with a text; empty when nothing is."""
        try:
            self._validator.validate(json.loads(text))
        except ValidationError as error:
            return error.message[:400]
        except (ValueError, RecursionError):
            return "it is not JSON"
        return ""


class OutputCheck:
    """The check of one request's outputs. Raises ApiError (400) when the constraint itself is wrong."""

    def __init__(self, constraint: Constraint | None) -> None:
        self._choices: frozenset[str] | None = None
        self._schema: SchemaCheck | None = None
        if constraint is None:
            return
        if constraint.field == "choices":
            assert not isinstance(constraint.value, str | bool)
            self._choices = frozenset(constraint.value.texts)
        elif constraint.field == "json_object":
            self._schema = SchemaCheck({"type": "object"}, constraint.param)
        elif constraint.field == "json_schema":
            assert isinstance(constraint.value, str)
            self._schema = SchemaCheck(_loaded(constraint.value, constraint.param), constraint.param)

    def __bool__(self) -> bool:
        """Whether there is anything to check."""
        return self._choices is not None or self._schema is not None

    def check(self, text: str, *, quotes: bool = True) -> None:
        """Raises ApiError (500) when a complete output is not what it must be; it may quote from the output."""
        if self._choices is not None and text not in self._choices:
            raise violation("The output is none of the choices.")
        if self._schema is not None and (fault := self._schema.fault(text)):
            raise violation(f"The output does not fit its schema{f': {fault}' if quotes else ''}.")


def violation(message: str) -> ApiError:
    """The answer when a model's output is not what the server promised."""
    return ApiError(500, message, type=SERVER_ERROR, code="invalid_output")


def _reason(error: Exception) -> str:
    """What is wrong with a schema, and where in it."""
    if not isinstance(error, ValidationError):
        return str(error)
    place = ".".join(map(str, error.instance_path))
    # The library matches in linear time, and says the same of what it cannot match as of what nobody can.
    message = error.message.replace(
        'is not a "regex"',
        "is no pattern, or one that looks ahead, looks behind or refers back, which is not supported",
    )
    return f"{place}: {message}" if place else message


def _loaded(text: str, param: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise invalid(param, f"{param}: Input should be a JSON schema, an object")
    return schema

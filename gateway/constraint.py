"""What the output must be: the ways in which clients say it, and the wire's one."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from gateway.errors import invalid
from gateway.schema import ChatBody, GenerateBody
from gateway.tools import forced_schema
from protos import sampling_pb2


class Constraint(NamedTuple):
    """A constraint of a body.

    Attributes:
        param: where the client wrote it.
        field: of SamplingParams.
        value: what goes there.
    """

    param: str
    field: str
    value: str | bool | sampling_pb2.Choices


def constraint_of(body: GenerateBody) -> Constraint | None:
    """The body's constraint, if it has one. Raises ApiError (400) when it has several."""
    found = list(_constraints(body))
    if len(found) > 1:
        raise invalid(found[1].param, f"only one of {found[0].param} and {found[1].param} can be followed")
    return found[0] if found else None


def _constraints(body: GenerateBody) -> Iterator[Constraint]:
    forced = forced_schema(body) if isinstance(body, ChatBody) else None
    if forced is not None:
        param, schema = forced
        yield Constraint(param, "json_schema", _schema(schema))
    wanted = body.response_format
    if wanted is not None and wanted.type == "json_object":
        yield Constraint("response_format", "json_object", True)
    if wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise invalid("response_format.json_schema", "response_format.json_schema: this field is required")
        yield Constraint("response_format.json_schema.schema", "json_schema", _schema(wanted.json_schema.schema_))
    outputs = body.structured_outputs
    if outputs is not None:
        named = {"json": outputs.json_, "regex": outputs.regex, "choice": outputs.choice, "grammar": outputs.grammar}
        for name, value in named.items():
            yield from _one(f"structured_outputs.{name}", name, value)
        if outputs.json_object:
            yield Constraint("structured_outputs.json_object", "json_object", True)
    for name in ("json", "regex", "choice", "grammar"):
        yield from _one(f"guided_{name}", name, getattr(body, f"guided_{name}"))


def _one(param: str, name: str, value: Any) -> Iterator[Constraint]:
    """A constraint under vLLM's name for it, unless it is absent."""
    if value is None:
        return
    if name == "json":
        yield Constraint(param, "json_schema", _schema(value))
    elif name == "choice":
        yield Constraint(param, "choices", sampling_pb2.Choices(texts=value))
    else:
        yield Constraint(param, name, value)


def _schema(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""What of a JSON schema a grammar can hold, for tools that do not ask for more.

A schema says what arguments mean as much as what they must be; without ``strict``, what no grammar can hold is for the
model to read and not to be held to.
"""

from collections.abc import Mapping
from typing import Any

from jsonschema_rs import RegexOptions, validator_for

# Keywords whose value is a schema or a list of them, and those that have schemas by name.
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "allOf")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
# Of the keywords that speak of values, those that the worker's grammars do not know.
_NOT_HELD = frozenset((
    "uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
))  # fmt: skip
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip


def loose_schema(schema: Any) -> Any:
    """The schema without keywords, formats and patterns that no grammar holds; ``oneOf`` becomes ``anyOf``.

    What it takes is no less than before. Whatever is no schema stays as it is, for others to complain about.
    """
    if isinstance(schema, list):
        return [loose_schema(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    loose: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            loose[key] = {name: loose_schema(one) for name, one in value.items() if _is_named(key, name)}
        elif key in _SCHEMAS:
            loose[key] = loose_schema(value)
        elif key == "oneOf" and "anyOf" not in schema:
            loose["anyOf"] = loose_schema(value)
        elif key != "oneOf" and _is_held(key, value):
            loose[key] = value
    return loose


def first_unheld(schema: Any, *place: str | int) -> str | None:
    """Where the first keyword stands that no grammar holds: "properties.a.uniqueItems"; None when there is none."""
    entries: list[tuple[Any, ...]] = []  # each a schema and what leads to it
    if isinstance(schema, list):
        entries = [(entry, index) for index, entry in enumerate(schema)]
    elif isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in _NOT_HELD:
                return ".".join(map(str, (*place, key)))
            if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
                entries += [(one, key, name) for name, one in value.items()]
            elif key in (*_SCHEMAS, "oneOf"):
                entries.append((value, key))
    found = (first_unheld(entry, *place, *way) for entry, *way in entries)
    return next((one for one in found if one is not None), None)


def _is_named(key: str, name: str) -> bool:
    return key != "patternProperties" or _is_pattern(name)


def _is_held(key: str, value: Any) -> bool:
    if key in _NOT_HELD:
        return False
    if key == "format":
        return value in _FORMATS if isinstance(value, str) else True
    return key != "pattern" or _is_pattern(value)


def _is_pattern(pattern: Any) -> bool:
    """Whether it can be matched in linear time: patterns that look around or back cannot."""
    try:
        validator_for({"pattern": pattern}, offline=True, pattern_options=RegexOptions(size_limit=1024 * 1024))
    except ValueError:
        return False
    return True

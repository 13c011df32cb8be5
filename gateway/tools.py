"""The tools of a request: which are offered, whether one must be called, and the schema that then binds the output.

Pure functions over the body.
"""

import json
from typing import Any

from gateway.errors import invalid
from gateway.loose_schema import first_unheld, loose_schema
from gateway.schema import ChatBody, Function, NamedTool

# Characters of all tools together, as JSON.
MAX_TOOLS_CHARS = 128 * 1024
# Calls of one reply where calling is required. A list without a bound is one that a model may never end.
MAX_PARALLEL_CALLS = 16

# What JSON schemas hold that is no schema.
_DATA = ("const", "enum", "default", "examples")


def check_tools(body: ChatBody) -> None:
    """Raises ApiError (400) for tools that cannot be offered, and a choice that cannot be made among them."""
    names: set[str] = set()
    size = 0
    for index, tool in enumerate(body.tools or ()):
        function = tool.function
        param = f"tools.{index}.function"
        if function.name in names:
            raise invalid(f"{param}.name", f"{param}.name: there are two functions named {function.name}")
        names.add(function.name)
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object":
            raise invalid(f"{param}.parameters", f"{param}.parameters: the schema's type must be object")
        size += len(json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False))
    if size > MAX_TOOLS_CHARS:
        raise invalid("tools", f"tools has {size} characters as JSON; at most {MAX_TOOLS_CHARS} are taken")
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not body.tools:
        raise invalid("tool_choice", "tool_choice demands a call, but there are no tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid(
            "tool_choice.function.name", f"tool_choice.function.name: no tool is named {choice.function.name}"
        )


def offered(body: ChatBody) -> list[Function]:
    """The functions that the model may call: none of them when the choice is none."""
    return [] if body.tool_choice == "none" else [tool.function for tool in body.tools or ()]


def named(body: ChatBody) -> Function | None:
    """The function that must be called, if the choice names one."""
    choice = body.tool_choice
    if not isinstance(choice, NamedTool):
        return None
    return next((function for function in offered(body) if function.name == choice.function.name), None)


def parallel(body: ChatBody) -> bool:
    """Whether a reply may have several calls."""
    return body.parallel_tool_calls is not False


def parameters_schema(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments. Without parameters it takes none."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}


def held_schema(function: Function, index: int) -> dict[str, Any]:
    """What a grammar holds arguments to: with ``strict`` to all of the schema, or else to what it can.

    Raises:
        ApiError: (400) the function, the tool at ``index``, is strict about what no grammar can hold.
    """
    schema = parameters_schema(function)
    if not function.strict:
        loose: dict[str, Any] = loose_schema(schema)
        return loose
    place = first_unheld(schema)
    if place is not None:
        param = f"tools.{index}.function.parameters"
        message = f"{param}: the schema of {function.name} cannot be followed strictly: {place} is not supported"
        raise invalid(param, f"{message}; leave it out, or do not ask for strict")
    return schema


def forced_schema(body: ChatBody) -> tuple[str, dict[str, Any]] | None:
    """What the output must be when the choice demands a call: the field that says so, and the schema.

    A named function's output is its arguments; where any will do, it is a list of names and parameters.

    Raises:
        ApiError: (400) see ``held_schema``.
    """
    function = named(body)
    if function is not None:
        index = offered(body).index(function)
        return f"tools.{index}.function.parameters", held_schema(function, index)
    if body.tool_choice != "required":
        return None
    functions = offered(body)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, function in enumerate(functions)
    ]
    param = "tools.0.function.parameters" if len(functions) == 1 else "tools"
    return param, {
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
        "maxItems": MAX_PARALLEL_CALLS if parallel(body) else 1,
        "$defs": {
            str(index): _moved(held_schema(function, index), f"#/$defs/{index}")
            for index, function in enumerate(functions)
        },
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own root are right where it stands at ``place``."""
    if isinstance(schema, list):
        return [_moved(entry, place) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        else:
            moved[key] = value if key in _DATA else _moved(value, place)
    return moved

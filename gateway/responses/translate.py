"""A body of the Responses API as a body of chat completions, and names of fields back. Pure functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gateway.bodies import validated
from gateway.errors import ApiError, invalid
from gateway.responses.schema import (
    Content,
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    NamedFunction,
    ResponsesBody,
    TextPart,
)
from gateway.schema import ChatBody

LOGPROBS = "message.output_text.logprobs"

# Chat's names of fields, the longest first, and this API's.
_NAMES = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "tool_choice.function": "tool_choice",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
# Of chat alone: n choices have no place in a response, and the others are said in other ways here.
_NOT_OURS = ("n", "messages", "max_tokens", "max_completion_tokens", "response_format", "reasoning_effort", "logprobs")


@dataclass(frozen=True)
class Translation:
    """What a body says in the words of chat completions.

    Attributes:
        chat: the same request.
        places: where each of its messages came from.
        ignored: names of fields that had no effect.
    """

    chat: ChatBody
    places: list[str]
    ignored: list[str]

    def name_of(self, field: str) -> str:
        """The client's name of a field of ``chat``."""
        return _param(field, self.places)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors that leave the block name the fields of the client's body."""
        try:
            yield
        except ApiError as error:
            if error.param is not None:
                named = self.name_of(error.param)
                error.message = error.message.replace(error.param, named)
                error.param = named
            raise


def translated(body: ResponsesBody) -> Translation:
    """Translates a body. Raises ApiError (400) for what would need a memory that this server has not."""
    _refuse(body)
    messages, places = _messages(body)
    fields: dict[str, Any] = {
        **{name: value for name, value in (body.model_extra or {}).items() if value is not None},
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools] if body.tools else None,
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body),
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
    }
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    try:
        chat = validated(ChatBody, {name: value for name, value in fields.items() if value is not None})
    except ApiError as error:
        if error.param is not None:
            error.param = _param(error.param, places)
        raise
    return Translation(chat, places, list(_ignored(body)))


def _refuse(body: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise _unsupported(name, "this server keeps nothing: send the whole conversation in input")
    if body.background:
        raise _unsupported("background", "a response is made while its client waits")
    if body.truncation == "auto":
        raise _unsupported("truncation", "nothing is left out of a conversation that is too long")
    for name in _NOT_OURS:
        if (body.model_extra or {}).get(name) is not None and not (name == "n" and (body.model_extra or {})[name] == 1):
            raise _unsupported(name, "it is a field of chat completions")


def _unsupported(name: str, why: str) -> ApiError:
    return invalid(name, f"{name} is not supported: {why}", code="unsupported_parameter")


def _ignored(body: ResponsesBody) -> Iterator[str]:
    if body.store:
        yield "store"
    yield from (f"include.{name}" for name in body.include or () if name != LOGPROBS)
    if body.stream_options:
        yield "stream_options"
    for name in ("text", "reasoning"):
        settings = getattr(body, name)
        for field, value in ((settings and settings.model_extra) or {}).items():
            if value is not None:
                yield f"{name}.{field}"


def _messages(body: ResponsesBody) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages, and where each came from. Neighbouring calls, and the words before them, are one turn."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []

    def add(place: str, **message: Any) -> None:
        messages.append(message)
        places.append(place)

    if body.instructions:
        add("instructions", role="system", content=body.instructions)
    if isinstance(body.input, str):
        add("input", role="user", content=body.input)
        return messages, places
    for index, item in enumerate(body.input):
        place = f"input.{index}"
        if isinstance(item, MessageItem):
            add(place, role=item.role, content=_text(item.content))
        elif isinstance(item, FunctionCallItem):
            if not (messages and messages[-1]["role"] == "assistant"):
                add(place, role="assistant")
            call = {"name": item.name, "arguments": item.arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
        elif isinstance(item, FunctionCallOutputItem):
            add(place, role="tool", tool_call_id=item.call_id, content=_text(item.output))
    if not messages:
        raise invalid("input", "input has no message")
    return messages, places


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.pop("type"), "function": tool}


def _tool_choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema_ is None:
        raise invalid("text.format.schema", "text.format.schema: this field is required")
    return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema_}}


def _param(param: str, places: list[str]) -> str:
    """The client's name of a field of chat."""
    param = param.replace("tools.function.", "tools.", 1)  # a name without the tool's place
    steps = param.split(".")
    if steps[0] == "messages" and len(steps) > 1 and steps[1].isdecimal() and int(steps[1]) < len(places):
        ours = {"content": "content", "tool_call_id": "call_id"}
        return ".".join([places[int(steps[1])], *(ours[step] for step in steps[2:3] if step in ours)])
    if steps[0] == "tools" and steps[2:3] == ["function"]:
        del steps[2]
        return ".".join(steps)
    for name, named in _NAMES.items():
        if param == name or param.startswith(f"{name}."):
            return named + param.removeprefix(name)
    return param

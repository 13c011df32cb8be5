"""A body of the Messages API as a body of chat completions. Pure functions."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gateway.bodies import validated
from gateway.errors import invalid
from gateway.messages.schema import (
    CountTokensBody,
    Message,
    MessagesBody,
    OutputConfig,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from gateway.schema import ChatBody, TokenizeBody, ignored_within

# Chat's names of fields, and this API's.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
}
# Of chat alone: a message is one choice, and the others are said in other ways here.
_NOT_OURS = (
    "n", "stop", "max_completion_tokens", "logprobs", "top_logprobs", "functions", "parallel_tool_calls",
    "response_format", "reasoning_effort",
)  # fmt: skip


def chat_body(body: MessagesBody) -> ChatBody:
    """The same request of chat completions. Raises ApiError (400)."""
    if body.messages[-1].role == "assistant":
        raise invalid("messages", "the last message must be the user's: an answer that is begun cannot be continued")
    for name in _NOT_OURS:
        if (body.model_extra or {}).get(name) is not None:
            raise invalid(name, f"{name} is a field of chat completions", code="unsupported_parameter")
    fields: dict[str, Any] = {
        **(body.model_extra or {}),
        **_conversation(body),
        "max_completion_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "user": body.metadata.user_id if body.metadata is not None else None,
        "tool_choice": _tool_choice(body),
    }
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    config = body.output_config or OutputConfig()
    if config.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}
    fields["reasoning_effort"] = "xhigh" if config.effort == "max" else config.effort
    if _thinks_not(body):
        fields["reasoning_effort"] = "none"
    return validated(ChatBody, {name: value for name, value in fields.items() if value is not None})


def tokenize_body(body: CountTokensBody) -> TokenizeBody:
    """The conversation, to be counted. Raises ApiError (400)."""
    return validated(TokenizeBody, _conversation(body))


def name_of(field: str, body: MessagesBody | None = None) -> str:
    """The client's name of a field of chat: of two that come to the same, that which ``body`` has."""
    if field == "reasoning_effort" and body is not None and _thinks_not(body):
        return "thinking"
    return _NAMES.get(field, field)


def _thinks_not(body: MessagesBody) -> bool:
    return body.thinking is not None and body.thinking.type == "disabled"


def ignored(body: MessagesBody) -> Iterator[str]:
    """Names of fields that had no effect, beside those that chat completions name."""
    if body.service_tier is not None:
        yield "service_tier"
    yield from dict.fromkeys(ignored_within(body))


def _conversation(body: CountTokensBody) -> dict[str, Any]:
    """What tokens are made of: model, messages and tools. Raises ApiError (400) for results of unknown calls."""
    _check_results(body.messages)
    system = [] if body.system is None else [{"role": "system", "content": _text(body.system)}]
    messages = [turn for message in body.messages for turn in _turns(message)]
    tools = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.input_schema, **_described(tool)}}
        for tool in body.tools or ()
    ]
    return {"model": body.model, "messages": [*system, *messages], **({"tools": tools} if tools else {})}


def _check_results(messages: Sequence[Message]) -> None:
    called: set[str] = set()
    for index, message in enumerate(messages):
        for place, block in enumerate(() if isinstance(message.content, str) else message.content):
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                param = f"messages.{index}.content.{place}.tool_use_id"
                raise invalid(param, f"{param}: no message before it uses a tool with the id {block.tool_use_id!r}")


def _described(tool: Any) -> dict[str, Any]:
    given = {"description": tool.description, "strict": tool.strict}
    return {name: value for name, value in given.items() if value is not None}


def _turns(message: Message) -> Iterator[dict[str, Any]]:
    """The turns of chat that a message is: each result of a call is one, and comes before the words."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    words = "".join(block.text for block in message.content if isinstance(block, TextBlock))
    calls = [_call(block) for block in message.content if isinstance(block, ToolUseBlock)]
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    for result in results:
        content = "" if result.content is None else _text(result.content)
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}
    if calls:
        yield {"role": message.role, "tool_calls": calls, **({"content": words} if words else {})}
    elif words or not results:
        yield {"role": message.role, "content": words}


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _tool_choice(body: MessagesBody) -> Any:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "tool_choice.name: this field is required")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type

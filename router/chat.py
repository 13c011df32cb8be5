"""Chats from the wire to what the template is given: messages, tools and values by name."""

import json
from typing import Any

from protos import inference_pb2
from router.chat_template import Message, TemplateExtras, ToolCall
from router.errors import InvalidArgument

MAX_TOOLS = 1024
# Of all JSON in a chat together: it is read and guarded before anyone knows its length in tokens.
MAX_JSON_CHARS = 1024 * 1024
MAX_JSON_DEPTH = 64


def check_messages(chat: inference_pb2.Chat) -> list[Message]:
    """The messages of a chat. Raises InvalidArgument."""
    if not chat.messages:
        raise InvalidArgument("chat.messages", "a chat must have at least one message")
    _check_size(chat)
    messages = []
    for index, message in enumerate(chat.messages):
        field = f"chat.messages[{index}]"
        if not message.role:
            raise InvalidArgument(f"{field}.role", "a message must have a role, say user")
        calls = tuple(
            ToolCall(call.id, call.name, _object(f"{field}.tool_calls[{place}].arguments", call.arguments))
            for place, call in enumerate(message.tool_calls)
        )
        messages.append(
            Message(
                message.role,
                message.content,
                message.name if message.HasField("name") else None,
                calls,
                message.tool_call_id if message.HasField("tool_call_id") else None,
            )
        )
    return messages


def check_extras(chat: inference_pb2.Chat) -> TemplateExtras:
    """Tools and template_kwargs of a chat. Raises InvalidArgument."""
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidArgument("chat.tools", f"there are {len(chat.tools)} tools; at most {MAX_TOOLS}")
    tools = [_object(f"chat.tools[{index}]", tool) for index, tool in enumerate(chat.tools)]
    for index, tool in enumerate(tools):
        if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
            raise InvalidArgument(
                f"chat.tools[{index}]", 'a tool must be {"type": "function", "function": {"name": ...}}'
            )
    kwargs = _object("chat.template_kwargs", chat.template_kwargs) if chat.template_kwargs else {}
    return TemplateExtras(tools, kwargs)


def characters_of(chat: inference_pb2.Chat) -> int:
    """Those of the messages, which every template writes down."""
    return sum(len(message.content) for message in chat.messages)


def _check_size(chat: inference_pb2.Chat) -> None:
    size = len(chat.template_kwargs) + sum(map(len, chat.tools))
    size += sum(len(call.arguments) for message in chat.messages for call in message.tool_calls)
    if size > MAX_JSON_CHARS:
        raise InvalidArgument("chat", f"tools and their calls have {size} characters; at most {MAX_JSON_CHARS}")


def _object(field: str, text: str) -> dict[str, Any]:
    """A JSON object of the client's. Raises InvalidArgument."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        # Halves of a character can be written in JSON and nowhere else.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not _shallow(value, MAX_JSON_DEPTH):
        raise InvalidArgument(field, f"this must be a JSON object, at most {MAX_JSON_DEPTH} levels deep")
    return value


def _refuse(constant: str) -> None:
    """NaN and its like are Python's, not JSON's."""
    raise ValueError(constant)


def _shallow(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    entries = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_shallow(entry, levels - 1) for entry in entries)

"""Conversations in the wire's form: with tools, calls and their results as the model's chat template takes them, or,
where it knows no tools, put into words in the format that replies are read in.
"""

import json
import re
from collections.abc import Sequence
from hashlib import blake2b

from gateway.errors import invalid
from gateway.schema import Function, Message
from gateway.tool_parsers import PARSERS
from protos import inference_pb2

# Roles that templates know by another name.
_ROLES = {"developer": "system"}
# All that templates of Mistral's models take as a call's id.
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ApiError (400) when a message lacks what its role needs, or has what its role cannot have, or is the
    result of a call that no message before it made."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise invalid(f"{where}.content", f"{where}.content: this field is required")
        if message.role != "assistant" and message.refuses():
            raise invalid(f"{where}.content", f"{where}.content: only the assistant refuses")
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"{where}.tool_calls", f"{where}.tool_calls: only the assistant calls tools")
        if message.role == "tool" and message.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id", f"{where}.tool_call_id: this field is required")
        if message.role == "tool" and message.tool_call_id not in called:
            param = f"{where}.tool_call_id"
            raise invalid(param, f"{param}: no message before it calls a tool with the id {message.tool_call_id!r}")
        called.update(call.id for call in message.tool_calls or ())
        for place, call in enumerate(message.tool_calls or ()):
            param = f"{where}.tool_calls.{place}.function.arguments"
            try:
                is_object = isinstance(json.loads(call.function.arguments or "{}"), dict)
            except (ValueError, RecursionError):
                is_object = False
            if not is_object:
                raise invalid(param, f"{param}: Input should be a JSON object, as a string")


def chat_with_tools(messages: Sequence[Message], functions: Sequence[Function], tool_format: str) -> inference_pb2.Chat:
    """A conversation for a template that takes tools.

    Args:
        messages: checked ones.
        functions: what the model may call.
        tool_format: the name of the format that the template writes calls in.
    """
    chat = inference_pb2.Chat(tools=[_definition(function) for function in functions])
    names: dict[str, str] = {}
    for message in messages:
        turn = chat.messages.add(role=_ROLES.get(message.role, message.role), content=message.text())
        for call in message.tool_calls or ():
            names[call.id] = call.function.name
            arguments = call.function.arguments or "{}"
            turn.tool_calls.add(id=_id(call.id, tool_format), name=call.function.name, arguments=arguments)
        name = message.name
        if message.role == "tool" and message.tool_call_id is not None:
            turn.tool_call_id = _id(message.tool_call_id, tool_format)
            name = name or names.get(message.tool_call_id)
        if name is not None:
            turn.name = name
    return chat


def _definition(function: Function) -> str:
    told = {"name": function.name, "description": function.description or ""}
    parameters = function.parameters or {"type": "object", "properties": {}}
    return json.dumps({"type": "function", "function": {**told, "parameters": parameters}}, ensure_ascii=False)


def _id(given: str, tool_format: str) -> str:
    if tool_format != "mistral" or _MISTRAL_ID.fullmatch(given):
        return given
    return blake2b(given.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]


def chat_in_words(messages: Sequence[Message], tool_format: str, instructions: str = "") -> inference_pb2.Chat:
    """A conversation for a template that knows no tools.

    Args:
        messages: checked ones.
        tool_format: the name of the format that calls are written in.
        instructions: stand before everything else.
    """
    chat = inference_pb2.Chat()
    names: dict[str, str] = {}
    if instructions and messages[0].role not in ("system", "developer", "user"):
        chat.messages.add(role="system", content=instructions)
        instructions = ""
    before: Message | None = None
    for message in messages:
        text = message.text()
        if message.role == "tool":
            called = names.get(message.tool_call_id or "")
            text = f"{called or 'The function'} returned:\n{text}"
            if before is not None and before.role == "tool":
                chat.messages[-1].content += f"\n\n{text}"
                continue
        calls = [
            PARSERS[tool_format].written(call.function.name, call.function.arguments or "{}")
            for call in message.tool_calls or ()
        ]
        names.update((call.id, call.function.name) for call in message.tool_calls or ())
        if instructions:
            text, instructions = f"{instructions}\n\n{text}", ""
        # A template that knows no tools knows no role for their results either.
        role = "user" if message.role == "tool" else _ROLES.get(message.role, message.role)
        turn = chat.messages.add(role=role, content="\n".join(filter(None, [text, *calls])))
        if message.name is not None:
            turn.name = message.name
        before = message
    return chat


def tool_instructions(functions: Sequence[Function], tool_format: str, required: bool, named: Function | None) -> str:
    """What the model is told of the functions; nothing when there are none."""
    if not functions:
        return ""
    lines = "\n".join(
        json.dumps(
            {"name": function.name, "description": function.description or "", "parameters": function.parameters or {}},
            ensure_ascii=False,
        )
        for function in functions
    )
    if named is not None:
        how = f"Call {named.name} now: reply with its arguments as a JSON object and nothing else."
    elif required:
        example = PARSERS["json"].written("NAME", "{...}")
        how = f"Call one or more of them now: reply with a JSON list and nothing else, like\n[{example}]"
    else:
        example = PARSERS[tool_format].written("NAME", "{...}")
        how = f"To call one, reply with nothing else but\n{example}\nOtherwise answer as usual."
    return f"You can call these functions:\n{lines}\n{how}"

"""How the model at hand is spoken to: which tools and values its chat template takes, and how it writes calls.

The router owns the template and describes it (``inference_pb2.ChatTemplate``). What the template does not take is told
in words, in the format in which replies are read.
"""

import json
from dataclasses import dataclass
from typing import Any

from gateway.schema import ChatBody, TokenizeBody
from protos import inference_pb2


@dataclass(frozen=True)
class Dialect:
    """How one request speaks to its model.

    Attributes:
        tool_format: in which calls are written and read: a name in ``tool_parsers.PARSERS``.
        native: tools, calls and their results are given to the template; else they are put into words.
        template_kwargs: for the template, as JSON; empty: nothing.
        ignored: fields of the body that the template does not look at.
    """

    tool_format: str
    native: bool = False
    template_kwargs: str = ""
    ignored: tuple[str, ...] = ()


def asks_for_template(body: ChatBody | TokenizeBody) -> bool:
    """Whether one must know the model's template to speak as the body wants it."""
    return bool(
        body.tools
        or body.chat_template_kwargs
        or getattr(body, "reasoning_effort", None)
        or any(message.tool_calls or message.role == "tool" for message in body.messages or ())
    )


def dialect_of(body: ChatBody | TokenizeBody, template: inference_pb2.ChatTemplate, parser: str) -> Dialect:
    """The dialect of a request; ``parser`` is the setting, auto included.

    Auto takes the template's own format, where replies in it can be read; a template with another one gets no tools.
    """
    auto = parser == "auto"
    native = template.takes_tools and (not auto or bool(template.tool_call_format))
    tool_format = (template.tool_call_format if native else "json") if auto else parser
    variables = frozenset(template.variables)
    kwargs = dict(body.chat_template_kwargs or {})
    ignored = [f"chat_template_kwargs.{name}" for name in kwargs if name not in variables]
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        wanted = _effort_kwargs(effort, variables)
        if not wanted:
            ignored.append("reasoning_effort")
        kwargs = {**wanted, **kwargs}
    return Dialect(tool_format, native, json.dumps(kwargs) if kwargs else "", tuple(ignored))


def thinks(body: ChatBody) -> bool:
    """False when the body asks for an answer without reasoning."""
    kwargs = body.chat_template_kwargs or {}
    return False not in (kwargs.get("enable_thinking"), kwargs.get("thinking")) and body.reasoning_effort != "none"


def _effort_kwargs(effort: str, variables: frozenset[str]) -> dict[str, Any]:
    """What templates call it: a few know degrees, others only whether or not."""
    if "reasoning_effort" in variables:
        return {"reasoning_effort": effort}
    return {name: effort != "none" for name in ("enable_thinking", "thinking") if name in variables}

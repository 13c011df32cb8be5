"""Renders chats with the model's Jinja template, in a sandbox, as transformers does. Knows no tokens."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.config import ConfigError

MAX_TEMPLATE_CHARS = 1024 * 1024
MAX_RENDERED_CHARS = 8 * 1024 * 1024
_MAX_MESSAGE_CHARS = 500
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


class TemplateRefusal(Exception):
    """The template cannot render this chat; the message is for the client: the template's own, where it has one."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; ``arguments`` is an object of JSON."""

    id: str
    name: str
    arguments: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """What the template sees."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def fields(self) -> dict[str, Any]:
        """What the template sees: fields that say nothing are not there, as templates ask whether they are."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            fields["name"] = self.name
        if self.tool_calls:
            fields["tool_calls"] = [call.fields() for call in self.tool_calls]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        return fields


@dataclass(frozen=True, slots=True)
class TemplateExtras:
    """What a template may get beside messages: definitions of tools, and values by name; all of it is JSON."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja text.
        tokens: what the template may write by name, say ``bos_token``.

    Attributes:
        takes_tools: it renders tools, calls and their results; found by rendering some.
        tool_call_format: how it writes calls, by the name of vLLM's parser for them; empty: in a way of its own.
        variables: what it looks at beside messages, tools and tokens.

    Raises:
        ConfigError: the template is too long or no Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read")
        self._tokens = dict(tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error.message}, line {error.lineno}") from error
        # What the server alone tells the template.
        self.reserved = _RESERVED | self._tokens.keys()
        self.variables = frozenset(names - self.reserved - environment.globals.keys())
        text = self._probe()
        self.takes_tools = all(word in text for word in _PROBE_WORDS)
        formats = (name for name, form in _CALL_FORMATS.items() if self.takes_tools and form.search(text))
        self.tool_call_format = next(formats, "")

    def _probe(self) -> str:
        try:
            return self.render(_PROBE, add_generation_prompt=True, extras=_PROBE_EXTRAS)
        except TemplateRefusal:
            return ""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        extras: TemplateExtras = TemplateExtras(),
    ) -> str:
        """The chat as text, turn marks included. Raises TemplateRefusal."""
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                {
                    **extras.kwargs,
                    "messages": [message.fields() for message in messages],
                    # Templates ask whether there are tools by `is not none`.
                    "tools": extras.tools or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **self._tokens,
                }
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED_CHARS:
                    raise TemplateRefusal(f"the rendered chat is longer than {MAX_RENDERED_CHARS} characters")
        except _Raised as error:
            raise TemplateRefusal(str(error.message)[:_MAX_MESSAGE_CHARS]) from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise TemplateRefusal("the model's chat template cannot render these messages") from error
        return "".join(pieces)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """JSON with each of its texts changed, names included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [mapped(entry, change) for entry in value]
    if isinstance(value, dict):
        return {change(name): mapped(entry, change) for name, entry in value.items()}
    return value


# A call whose parts are easily found again. Some templates want ids of nine letters and digits.
_PROBE_WORDS = ("probed_tool", "probed_argument", "probed_result")
_PROBE_TOOL = {
    "name": _PROBE_WORDS[0],
    "description": "Probes.",
    "parameters": {"type": "object", "properties": {"value": {"type": "string", "description": "A value."}}},
}
_PROBE_EXTRAS = TemplateExtras([{"type": "function", "function": _PROBE_TOOL}])
_PROBE = (
    Message("user", "Probe."),
    Message("assistant", "", tool_calls=(ToolCall("probe0000", "called_tool", {"value": _PROBE_WORDS[1]}),)),
    Message("tool", _PROBE_WORDS[2], name="called_tool", tool_call_id="probe0000"),
)

_CALL_FORMATS = {
    "hermes": re.compile(r'<tool_call>\s*\{"name": "called_tool", "arguments":'),
    "mistral": re.compile(r"\[TOOL_CALLS\]"),
    "llama3_json": re.compile(r'\{"name": "called_tool", "parameters":'),
}


class _Raised(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generation(jinja2.ext.Extension):
    """Lets templates mark the assistant's words with ``{% generation %}``, which says nothing to a server."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Raised(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

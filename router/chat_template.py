"""Renders chats with the model's Jinja template, in a sandbox, as transformers does. Knows no tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.config import ConfigError

MAX_TEMPLATE_CHARS = 1024 * 1024
MAX_RENDERED_CHARS = 8 * 1024 * 1024
_MAX_MESSAGE_CHARS = 500


class TemplateRefusal(Exception):
    """The template cannot render this chat; the message is for the client: the template's own, where it has one."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str
    name: str | None = None

    def fields(self) -> dict[str, str]:
        """What the template sees."""
        fields = {"role": self.role, "content": self.content}
        return fields if self.name is None else {**fields, "name": self.name}


class ChatTemplate:
    """A compiled template.

    Args:
        source: the Jinja text.
        tokens: what the template may write by name, say ``bos_token``.

    Raises:
        ConfigError: the template is too long or no Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read")
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error.message}, line {error.lineno}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The chat as text, turn marks included. Raises TemplateRefusal."""
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                messages=[message.fields() for message in messages],
                tools=[],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
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

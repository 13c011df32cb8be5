"""Renders chat messages with the model's Jinja template, in a sandbox."""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateFailed(ValueError):
    """The template refused the messages, or is broken; the message says how."""


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja, as in tokenizer_config.json or a GGUF file's ``tokenizer.chat_template``.
        variables: names that the template may use, such as ``bos_token``.

    Raises:
        TemplateFailed: the source does not compile.
    """

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        # What templates written for transformers expect to find.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._variables = variables
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFailed(f"the chat template does not compile, line {error.lineno}: {error.message}") from error

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt's text. Raises TemplateFailed with the template's own words when it refuses the messages."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except jinja2.TemplateError as error:
            raise TemplateFailed(error.message or "the chat template failed") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            # A template's arithmetic on a message that it did not expect.
            raise TemplateFailed("the chat template cannot render these messages") from error


def _raise(text: str) -> NoReturn:
    raise jinja2.TemplateError(text)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as it stands, not escaped for HTML as Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)

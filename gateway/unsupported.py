"""Fields that clients know and this server does not act on yet, refused when they would change the result.

To support a field: act on it in ``translate`` and delete its line here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gateway.errors import invalid
from gateway.schema import Body, ChatBody, CompletionBody, Message

Harmless = Callable[[Any], bool]
"""Whether a value (never null) asks for nothing but what happens anyway."""


def _never(value: Any) -> bool:
    return False


def _empty(value: Any) -> bool:
    return not value


def _one_of(*values: Any) -> Harmless:
    return lambda value: value in values


_GENERATE: Mapping[str, Harmless] = {
    "detokenize": _one_of(True),
    "guided_whitespace_pattern": _never,
    "prompt_embeds": _never,
    "prompt_logprobs": _never,
    "return_token_ids": _one_of(False),
    "return_tokens_as_token_ids": _one_of(False),
    "skip_special_tokens": _one_of(True),
    "spaces_between_special_tokens": _one_of(True),
    "truncate_prompt_tokens": _never,
    "use_beam_search": _one_of(False),
}

_CHAT: Mapping[str, Harmless] = {
    **_GENERATE,
    "functions": _empty,
    "function_call": _one_of("none", "auto"),
    "modalities": _one_of(["text"]),
    "audio": _never,
    "continue_final_message": _one_of(False),
    "chat_template": _never,
}

_NO_SUFFIX = (
    "suffix is not supported, as it takes tokens of its own that only some models have. For such a model, send prompt "
    "as token ids with these tokens around both texts, in the order that the model was trained on; for any other, ask "
    "in a chat for what stands between the two."
)

_MESSAGE: Mapping[str, Harmless] = {
    "function_call": _never,
    "audio": _never,
}


def refuse_unsupported(body: ChatBody | CompletionBody) -> None:
    """Raises ApiError (400) for the first field that would change the result and is not supported."""
    if isinstance(body, ChatBody):
        _refuse(body, _CHAT)
        refuse_in_messages(body.messages)
        return
    if body.suffix:
        raise invalid("suffix", _NO_SUFFIX, code="unsupported_parameter")
    _refuse(body, _GENERATE)
    # Fewer candidates than choices are wrong for OpenAI too; more would need logprobs to choose the best.
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", "best_of is only supported when it equals n", code="unsupported_parameter")


def refuse_in_messages(messages: list[Message]) -> None:
    """Raises ApiError (400) for the first part of a message that is not supported."""
    for index, message in enumerate(messages):
        _refuse(message, _MESSAGE, prefix=f"messages.{index}.")


def _refuse(body: Body, table: Mapping[str, Harmless], prefix: str = "") -> None:
    for name, harmless in table.items():
        # Finds undeclared fields too: pydantic keeps them as attributes.
        value = getattr(body, name, None)
        if value is not None and not harmless(value):
            param = prefix + name
            raise invalid(param, f"{param} is not supported yet with this value", code="unsupported_parameter")

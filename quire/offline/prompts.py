"""What a prompt may be, and how it is put into a request. Needs no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypeAlias, TypedDict

from protos import inference_pb2
from quire.offline.sampling_params import is_token_id

# As the gateway has it: roles that templates know by another name.
_ROLES = {"developer": "system"}


class TextPrompt(TypedDict):
    """A text; cached prefixes are shared among prompts of one salt only."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, and if you like the text that they stand for, which the output then repeats."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation for the model's chat template.

    Attributes:
        messages: each with a ``role``, a ``content`` (text, or a list of parts of type text) and perhaps a ``name``.
        add_generation_prompt: open the assistant's turn after the last message.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True


_KINDS = "a string, a list of token ids, a dict with 'prompt' or 'prompt_token_ids', or a ChatPrompt"

Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | ChatPrompt


def one_by_one(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of an argument that may be one or several: a list of ids is one. Raises ValueError: it is neither."""
    if not isinstance(prompts, Iterable | ChatPrompt):
        raise ValueError(f"prompts is {prompts!r}; it must be {_KINDS}, or a list of those")
    if isinstance(prompts, str | Mapping | ChatPrompt) or (prompts and all(map(is_token_id, prompts))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def put_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> str | None:
    """Writes a prompt into a request.

    Returns:
        Its text, where the caller gave one.

    Raises:
        ValueError: it is of no known kind.
    """
    if isinstance(prompt, ChatPrompt):
        _put_chat(request.chat, prompt)
        return None
    if isinstance(prompt, str):
        request.text = _encodable(prompt)
        return prompt
    if isinstance(prompt, Mapping):
        return _put_mapping(request, dict(prompt))
    _put_ids(request, prompt)
    return None


def _put_mapping(request: inference_pb2.GenerateRequest, prompt: dict[str, Any]) -> str | None:
    unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown:
        raise ValueError(f"a prompt has {', '.join(map(repr, sorted(unknown)))}, which is not supported")
    for name in ("prompt", "cache_salt"):
        if not isinstance(prompt.get(name, ""), str):
            raise ValueError(f"{name} is {prompt[name]!r}; it must be a string")
    request.cache_salt = prompt.get("cache_salt", "")
    text: str | None = prompt.get("prompt")
    if "prompt_token_ids" in prompt:
        _put_ids(request, prompt["prompt_token_ids"])
    elif text is not None:
        request.text = _encodable(text)
    else:
        raise ValueError("a prompt given as a dict needs 'prompt' or 'prompt_token_ids'")
    return text


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a prompt has a lone surrogate, which is no character, at position {error.start}") from None
    return text


def _put_ids(request: inference_pb2.GenerateRequest, token_ids: object) -> None:
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise ValueError(f"a prompt is {token_ids!r}; it must be {_KINDS}")
    for index, token_id in enumerate(token_ids):
        if not is_token_id(token_id):
            raise ValueError(f"prompt_token_ids[{index}] is {token_id!r}; it must be a token id")
    request.token_ids.SetInParent()  # an empty list is a prompt too, and refused as such
    request.token_ids.ids.extend(token_ids)


def _put_chat(chat: inference_pb2.Chat, prompt: ChatPrompt) -> None:
    chat.SetInParent()
    chat.add_generation_prompt = prompt.add_generation_prompt
    for index, message in enumerate(prompt.messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} is {message!r}; it must be a dict with 'role' and 'content'")
        unknown = message.keys() - {"role", "content", "name"}
        if unknown:
            raise ValueError(f"{where} has {', '.join(map(repr, sorted(unknown)))}, which is not supported")
        role, name = message.get("role"), message.get("name")
        if not isinstance(role, str):
            raise ValueError(f"{where}.role is {role!r}; it must be a string, say 'user'")
        if not isinstance(name, str | None):
            raise ValueError(f"{where}.name is {name!r}; it must be a string")
        chat.messages.add(role=_ROLES.get(role, role), content=_text_of(message.get("content"), where), name=name)


def _text_of(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content or not all(map(_is_text_part, content)):
        raise ValueError(f"{where}.content is {content!r}; it must be a string or a list of text parts")
    return "".join(part["text"] for part in content)


def _is_text_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)

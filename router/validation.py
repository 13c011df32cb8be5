"""Checks what clients send and fills in defaults. Names each wrong field by its path."""

import math
import secrets
from collections.abc import Sequence

from protos import inference_pb2, sampling_pb2
from router.chat_template import Message
from router.errors import ContextTooLong, InvalidArgument
from router.request import GenerateParams

MAX_CHOICES = 8
MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_ID_CHARS = 256


def check_generate(
    request: inference_pb2.GenerateRequest, eos_token_ids: frozenset[int], vocab_size: int
) -> GenerateParams:
    """Everything but the prompt. A seed is drawn when there is none. Raises InvalidArgument."""
    for field in ("request_id", "cache_salt"):
        if len(getattr(request, field)) > MAX_ID_CHARS:
            raise InvalidArgument(
                field, f"{field} has {len(getattr(request, field))} characters; at most {MAX_ID_CHARS}"
            )
    count = request.n if request.HasField("n") else 1
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidArgument("n", f"n is {count}; it must be 1 to {MAX_CHOICES}")
    sampling, stopping, output = request.sampling, request.stopping, request.output
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise InvalidArgument("stopping.max_tokens", "max_tokens is 0; it must be at least 1")
    _check_stops(stopping, vocab_size)
    return GenerateParams(
        model=request.model,
        n=count,
        temperature=_number(sampling, "temperature", 1.0, 0.0, MAX_TEMPERATURE),
        top_p=_number(sampling, "top_p", 1.0, 0.0, 1.0, above=True),
        top_k=sampling.top_k if sampling.HasField("top_k") else 0,
        min_p=_number(sampling, "min_p", 0.0, 0.0, 1.0),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        stop=tuple(stopping.stop),
        eos_token_ids=frozenset() if stopping.ignore_eos else eos_token_ids,
        stop_token_ids=frozenset(stopping.stop_token_ids),
        keep_stop=stopping.include_stop_str_in_output,
        text=output.text if output.HasField("text") else True,
        token_ids=output.token_ids,
        final_only=output.final_only,
        cache_salt=request.cache_salt.encode(),
    )


def _number(
    sampling: sampling_pb2.SamplingParams, name: str, default: float, low: float, high: float, *, above: bool = False
) -> float:
    """A number of the sampling parameters; ``above``: it must be greater than ``low``, not just equal."""
    if not sampling.HasField(name):
        return default
    value = float(getattr(sampling, name))
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        span = f"above {low:g} and at most {high:g}" if above else f"{low:g} to {high:g}"
        raise InvalidArgument(f"sampling.{name}", f"{name} is {value:g}; it must be {span}")
    return value


def _check_stops(stopping: sampling_pb2.StopConditions, vocab_size: int) -> None:
    if len(stopping.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument("stopping.stop", f"stop has {len(stopping.stop)} strings; at most {MAX_STOP_STRINGS}")
    for index, stop in enumerate(stopping.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidArgument(
                f"stopping.stop[{index}]",
                f"a stop string has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARS}",
            )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(
            "stopping.stop_token_ids",
            f"stop_token_ids has {len(stopping.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}",
        )
    check_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument, naming the first, when an id is not in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidArgument(
            f"{field}[{index}]", f"token id {token_ids[index]} is not in the vocabulary of {vocab_size} tokens"
        )


def check_chat(chat: inference_pb2.Chat) -> list[Message]:
    """The messages of a chat. Raises InvalidArgument."""
    if not chat.messages:
        raise InvalidArgument("chat.messages", "a chat must have at least one message")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidArgument(f"chat.messages[{index}].role", "a message must have a role, say user")
    return [
        Message(message.role, message.content, message.name if message.HasField("name") else None)
        for message in chat.messages
    ]


def check_text_length(field: str, characters: int, longest_token: int, max_model_len: int) -> None:
    """Refuses a text of which one can say without tokenizing it that it is too long. Raises ContextTooLong."""
    if characters > longest_token * max_model_len:
        raise ContextTooLong(
            field,
            f"the prompt has {characters} characters, which cannot fit the model's context of {max_model_len} tokens",
        )


def resolve_max_tokens(field: str, prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens a request may generate.

    Args:
        field: where the prompt stands in the request.

    Raises:
        InvalidArgument: the prompt is empty.
        ContextTooLong: prompt and output do not fit.
    """
    if not prompt_tokens:
        raise InvalidArgument(field, "the prompt is empty")
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextTooLong(
            field,
            f"the prompt has {prompt_tokens} tokens; the model's context has room for {max_model_len}, prompt and "
            "output together",
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise ContextTooLong(
            "stopping.max_tokens",
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}; together they must fit the model's "
            f"context of {max_model_len} tokens",
        )
    return max_tokens

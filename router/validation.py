"""Checks the fields of a Generate call and fills in every default."""

import math
import secrets
from collections.abc import Iterable

from protos import inference_pb2
from router.errors import ContextExceeded, InvalidRequest
from router.request import Parameters
from router.tokenizer import ChatMessage

MAX_CHOICES = 8
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128
MAX_MESSAGES = 4096
MAX_REQUEST_ID = 128
MAX_CACHE_SALT = 128


def check_request(request: inference_pb2.GenerateRequest, vocab_size: int) -> None:
    """Checks all that can be checked before the prompt is tokenized.

    Raises:
        InvalidRequest: names the first field that is wrong.
    """
    if len(request.request_id) > MAX_REQUEST_ID:
        raise InvalidRequest("request_id", f"has {len(request.request_id)} characters; at most {MAX_REQUEST_ID}")
    if len(request.cache_salt) > MAX_CACHE_SALT:
        raise InvalidRequest("cache_salt", f"has {len(request.cache_salt)} characters; at most {MAX_CACHE_SALT}")
    if request.HasField("n") and not 1 <= request.n <= MAX_CHOICES:
        raise InvalidRequest("n", f"is {request.n}; wanted 1 to {MAX_CHOICES}")
    check_prompt(request, vocab_size)
    sampling, stopping = request.sampling, request.stopping
    _check_range("sampling.temperature", sampling.temperature, 0, 2)
    if sampling.HasField("top_p"):
        _check_range("sampling.top_p", sampling.top_p, 0, 1)
        if sampling.top_p == 0:
            raise InvalidRequest("sampling.top_p", "is 0; wanted above 0, at most 1")
    _check_range("sampling.min_p", sampling.min_p, 0, 1)
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise InvalidRequest("stopping.max_tokens", "is 0; wanted at least 1")
    if len(stopping.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stopping.stop", f"has {len(stopping.stop)} strings; at most {MAX_STOP_STRINGS}")
    for index, stop in enumerate(stopping.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stopping.stop[{index}]", f"has {len(stop)} characters; wanted 1 to {MAX_STOP_CHARACTERS}"
            )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            "stopping.stop_token_ids", f"has {len(stopping.stop_token_ids)}; at most {MAX_STOP_TOKENS}"
        )
    _check_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)


def check_prompt(
    request: "inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.ExplainRequest",
    vocab_size: int,
) -> None:
    """Checks that there is a prompt. Raises InvalidRequest."""
    match request.WhichOneof("prompt"):
        case None:
            raise InvalidRequest("prompt", "is missing; give text, token_ids or chat")
        case "token_ids":
            assert not isinstance(request, inference_pb2.TokenizeRequest)
            if not request.token_ids.ids:
                raise InvalidRequest("token_ids.ids", "is empty; wanted at least one token")
            _check_ids("token_ids.ids", request.token_ids.ids, vocab_size)
        case "chat":
            messages = request.chat.messages
            if not 1 <= len(messages) <= MAX_MESSAGES:
                raise InvalidRequest("chat.messages", f"has {len(messages)} messages; wanted 1 to {MAX_MESSAGES}")
            for index, message in enumerate(messages):
                if not message.role:
                    raise InvalidRequest(f"chat.messages[{index}].role", "is empty; wanted user, assistant or system")


def chat_messages(chat: inference_pb2.Chat) -> list[ChatMessage]:
    """The messages as the tokenizer wants them."""
    return [
        ChatMessage(message.role, message.content, message.name if message.HasField("name") else None)
        for message in chat.messages
    ]


def resolve_parameters(
    request: inference_pb2.GenerateRequest,
    prompt_tokens: int,
    max_model_len: int,
    eos_token_ids: tuple[int, ...],
) -> Parameters:
    """Fills in every default.

    Args:
        request: checked by ``check_request``.
        prompt_tokens: length of the tokenized prompt.
        max_model_len: most tokens of prompt and output together.
        eos_token_ids: the model's own end-of-sequence tokens.

    Raises:
        InvalidRequest: the prompt is empty.
        ContextExceeded: prompt and output do not fit.
    """
    field = request.WhichOneof("prompt") or "prompt"
    if not prompt_tokens:
        raise InvalidRequest(field, "has no tokens; wanted at least one")
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextExceeded(
            field,
            f"the prompt has {prompt_tokens} tokens, but the model's context is {max_model_len} tokens "
            "and must leave room for at least one more",
        )
    sampling, stopping, output = request.sampling, request.stopping, request.output
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else room
    if max_tokens > room:
        raise ContextExceeded(
            "stopping.max_tokens",
            f"is {max_tokens}, but after the prompt's {prompt_tokens} tokens the model's context of "
            f"{max_model_len} tokens has room for {room}",
        )
    eos = () if stopping.ignore_eos else eos_token_ids
    return Parameters(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        max_tokens=max_tokens,
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(dict.fromkeys((*eos, *stopping.stop_token_ids))),
        eos_token_ids=eos,
        include_stop_str_in_output=stopping.include_stop_str_in_output,
        n=request.n if request.HasField("n") else 1,
        text=output.text if output.HasField("text") else True,
        token_ids=output.token_ids,
        final_only=output.final_only,
    )


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(field, f"is {value}; wanted {low} to {high}")


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for index, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise InvalidRequest(f"{field}[{index}]", f"is {token_id}; the vocabulary has {vocab_size} tokens")

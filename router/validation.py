"""Checks what clients send and fills in defaults. Names each wrong field by its path."""

import math
import secrets
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from protos import inference_pb2, sampling_pb2
from router.constraints import check_constraint
from router.errors import ContextTooLong, InvalidArgument
from router.request import GenerateParams

MAX_CHOICES = 8
MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_ID_CHARS = 256
# The client's names for things.
_NAMES = frozenset({"request_id", "cache_salt", "tenant", "session_id"})
# Of each number of the sampling parameters: the least and the most that it may be, and whether the least is too little.
_NUMBERS = {
    "temperature": (0.0, MAX_TEMPERATURE, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.01, 2.0, False),
}
# All log-probabilities of a prompt go out in one message, each entry (id, value, bytes) taking less than this.
_MAX_REPORT_BYTES = 12 << 20
_ENTRY_BYTES = 24


def check_generate(
    request: inference_pb2.GenerateRequest,
    eos_token_ids: frozenset[int],
    vocab_size: int,
    takes_priorities: bool = False,
) -> GenerateParams:
    """Everything but the prompt. A seed is drawn when there is none. Raises InvalidArgument."""
    given = _given(request)
    for field in given.keys() & _NAMES:
        if len(given[field]) > MAX_ID_CHARS:
            raise InvalidArgument(field, f"{field} has {len(given[field])} characters; at most {MAX_ID_CHARS}")
    if not request.request_id.isprintable():
        raise InvalidArgument("request_id", "request_id has characters that cannot be printed, which logs would show")
    count = given.get("n", 1)
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidArgument("n", f"n is {count}; it must be 1 to {MAX_CHOICES}")
    if request.priority and not takes_priorities:
        raise InvalidArgument(
            "priority",
            f"priority is {request.priority}, but requests are served first come, first served; leave it out, or start "
            "the server with --scheduling-policy priority",
        )
    sampling, stopping, output = _given(request.sampling), _given(request.stopping), _given(request.output)
    max_tokens = stopping.get("max_tokens")
    if max_tokens is not None and max_tokens < 1:
        raise InvalidArgument("stopping.max_tokens", "max_tokens is 0; it must be at least 1")
    for field in sampling.keys() & _NUMBERS.keys():
        _check_number(field, sampling[field])
    if "stop" in stopping or "stop_token_ids" in stopping:
        _check_stops(request.stopping, vocab_size)
    return GenerateParams(
        model=request.model,
        n=count,
        temperature=sampling.get("temperature", 1.0),
        top_p=sampling.get("top_p", 1.0),
        top_k=sampling.get("top_k", 0),
        min_p=sampling.get("min_p", 0.0),
        seed=sampling["seed"] if "seed" in sampling else secrets.randbits(63),
        presence_penalty=sampling.get("presence_penalty", 0.0),
        frequency_penalty=sampling.get("frequency_penalty", 0.0),
        repetition_penalty=sampling.get("repetition_penalty", 1.0),
        logit_bias=_check_bias(request.sampling, vocab_size) if "logit_bias" in sampling else {},
        allowed_token_ids=_check_allowed(request.sampling, vocab_size) if "allowed_token_ids" in sampling else (),
        constraint=check_constraint(request.sampling),
        bad_words=_check_bad_words(request.stopping) if "bad_words" in stopping else (),
        min_tokens=_check_min_tokens(request.stopping) if "min_tokens" in stopping else 0,
        max_tokens=max_tokens,
        stop=tuple(stopping.get("stop", ())),
        eos_token_ids=frozenset() if stopping.get("ignore_eos") else eos_token_ids,
        stop_token_ids=frozenset(stopping.get("stop_token_ids", ())),
        keep_stop=stopping.get("include_stop_str_in_output", False),
        text=output.get("text", True),
        token_ids=output.get("token_ids", False),
        final_only=output.get("final_only", False),
        token_bytes=output.get("token_bytes", False),
        logprobs=_top_count(output, "logprobs"),
        prompt_logprobs=_top_count(output, "prompt_logprobs"),
        cache_salt=request.cache_salt.encode(),
        skip_reading_prefix_cache=given.get("skip_reading_prefix_cache", False),
        priority=given.get("priority", 0),
        tenant=given.get("tenant", ""),
        session_id=given.get("session_id", ""),
    )


def _given(message: Message) -> dict[str, Any]:
    """The fields that are set, by name: most are not, and asking for each one costs more than all checks."""
    return {field.name: value for field, value in message.ListFields()}


def _check_number(name: str, value: float) -> None:
    low, high, above = _NUMBERS[name]
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        span = f"above {low:g} and at most {high:g}" if above else f"{low:g} to {high:g}"
        raise InvalidArgument(f"sampling.{name}", f"{name} is {value:g}; it must be {span}")


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


def _check_bias(sampling: sampling_pb2.SamplingParams, vocab_size: int) -> dict[int, float]:
    field = "sampling.logit_bias"
    bias = dict(sampling.logit_bias)
    if len(bias) > MAX_BIASES:
        raise InvalidArgument(field, f"logit_bias has {len(bias)} tokens; at most {MAX_BIASES}")
    for token_id, value in bias.items():
        if token_id >= vocab_size:
            raise InvalidArgument(
                f"{field}.{token_id}", f"token id {token_id} is not in the vocabulary of {vocab_size} tokens"
            )
        if not (math.isfinite(value) and -MAX_BIAS <= value <= MAX_BIAS):
            raise InvalidArgument(
                f"{field}.{token_id}", f"a bias is {value:g}; it must be {-MAX_BIAS:g} to {MAX_BIAS:g}"
            )
    return bias


def _check_allowed(sampling: sampling_pb2.SamplingParams, vocab_size: int) -> tuple[int, ...]:
    field = "sampling.allowed_token_ids"
    allowed = sampling.allowed_token_ids
    if len(allowed) > MAX_BIASES:
        raise InvalidArgument(field, f"allowed_token_ids has {len(allowed)} ids; at most {MAX_BIASES}")
    check_ids(field, allowed, vocab_size)
    return tuple(dict.fromkeys(allowed))


def check_tokens_left(params: GenerateParams, bad_word_ids: Sequence[Sequence[int]]) -> None:
    """Raises InvalidArgument when an output would have no first token: all that are allowed are banned as well."""
    banned = {ids[0] for ids in bad_word_ids if len(ids) == 1}
    if params.min_tokens:
        banned |= params.eos_token_ids | params.stop_token_ids
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        raise InvalidArgument(
            "sampling.allowed_token_ids", "of allowed_token_ids, bad_words and min_tokens leave none to choose from"
        )


def _check_bad_words(stopping: sampling_pb2.StopConditions) -> tuple[str, ...]:
    words = stopping.bad_words
    if len(words) > MAX_BAD_WORDS:
        raise InvalidArgument("stopping.bad_words", f"bad_words has {len(words)} words; at most {MAX_BAD_WORDS}")
    for index, word in enumerate(words):
        if not (word.strip() and len(word) <= MAX_BAD_WORD_CHARS):
            raise InvalidArgument(
                f"stopping.bad_words[{index}]",
                f"a bad word must have 1 to {MAX_BAD_WORD_CHARS} characters that are not all blank",
            )
    return tuple(words)


def _check_min_tokens(stopping: sampling_pb2.StopConditions) -> int:
    count = stopping.min_tokens
    if stopping.HasField("max_tokens") and count > stopping.max_tokens:
        raise InvalidArgument(
            "stopping.min_tokens", f"min_tokens is {count}, more than max_tokens, which is {stopping.max_tokens}"
        )
    return count


def _top_count(output: dict[str, Any], name: str) -> int | None:
    count: int | None = output.get(name)
    if count is not None and count > MAX_TOP_LOGPROBS:
        raise InvalidArgument(f"output.{name}", f"{name} is {count}; it must be 0 to {MAX_TOP_LOGPROBS}")
    return count


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument, naming the first, when an id is not in the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidArgument(
            f"{field}[{index}]", f"token id {token_ids[index]} is not in the vocabulary of {vocab_size} tokens"
        )


def check_text_length(field: str, characters: int, longest_token: int, max_model_len: int) -> None:
    """Refuses a text of which one can say without tokenizing it that it is too long. Raises ContextTooLong."""
    if characters > longest_token * max_model_len:
        raise ContextTooLong(
            field,
            f"the prompt has {characters} characters, which cannot fit the model's context of {max_model_len} tokens",
        )


def check_prompt_logprobs(params: GenerateParams, prompt_tokens: int) -> None:
    """Raises InvalidArgument when a prompt's log-probabilities would not fit into a message."""
    if params.prompt_logprobs is None:
        return
    most = _MAX_REPORT_BYTES // (_ENTRY_BYTES * (1 + params.prompt_logprobs))
    if prompt_tokens > most:
        raise InvalidArgument(
            "output.prompt_logprobs",
            f"the prompt has {prompt_tokens} tokens; with {params.prompt_logprobs} alternatives each, "
            f"log-probabilities are reported of at most {most}",
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

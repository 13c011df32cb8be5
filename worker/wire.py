"""The engine's sequences and what becomes of them, in the messages of protos/worker.proto."""

import json
import math
import time

import numpy as np

from protos import sampling_pb2, worker_pb2
from protos.prefix import chain_root
from worker.engine import EngineLimits
from worker.grammar import Constraint
from worker.sequence import FinishReason, SamplingParams, Sequence, TokenLogprobs, token_array

REASONS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: sampling_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: sampling_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: sampling_pb2.FINISH_REASON_ERROR,
}

# Alternatives of a token that may be asked for.
MAX_LOGPROBS = 20


class InvalidSubmit(ValueError):
    """A field of a Submit is out of range."""


def sequence_of(submit: worker_pb2.Submit, limits: EngineLimits) -> Sequence:
    """The sequence that a Submit describes. Raises InvalidSubmit when the engine could not run it."""
    prompt = submit.prompt_token_ids
    if not prompt or len(prompt) % 4:
        raise InvalidSubmit(f"prompt_token_ids has {len(prompt)} bytes; wanted four for each of at least one token")
    length = len(prompt) // 4
    largest = int(np.frombuffer(prompt, dtype="<u4").max())
    if largest >= limits.vocab_size:
        raise InvalidSubmit(f"prompt has token id {largest}; the vocabulary has {limits.vocab_size}")
    if not submit.num_emitted < submit.max_tokens:
        raise InvalidSubmit(f"max_tokens is {submit.max_tokens}; wanted more than num_emitted, {submit.num_emitted}")
    if submit.num_emitted >= length:
        raise InvalidSubmit(f"num_emitted is {submit.num_emitted} of a prompt of {length} tokens")
    longest = length - submit.num_emitted + submit.max_tokens
    if longest > limits.max_model_len:
        raise InvalidSubmit(f"prompt and max_tokens need {longest} tokens of {limits.max_model_len}")
    if submit.priority and not limits.takes_priorities:
        raise InvalidSubmit(f"priority is {submit.priority}; this worker runs with --scheduling-policy fcfs")
    deadline = time.monotonic() + submit.time_left_ms / 1000 if submit.HasField("time_left_ms") else None
    return Sequence(
        request_id=submit.request_id,
        tokens=token_array(prompt),
        sampling=_sampling(submit, limits.vocab_size),
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        num_emitted=submit.num_emitted,
        cache_root=chain_root(submit.cache_salt),
        deadline=deadline,
        priority=submit.priority,
        skip_reading_prefix_cache=submit.skip_reading_prefix_cache,
    )


def constraint_of(sampling: sampling_pb2.SamplingParams) -> Constraint | None:
    """What the output must be, if anything."""
    kind = sampling.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "json_object":
        return Constraint(kind)
    if kind == "choices":
        return Constraint(kind, json.dumps(list(sampling.choices.texts)))
    return Constraint(kind, getattr(sampling, kind))


def blamed_field(seq: Sequence) -> str:
    """The request's field that is to blame for the sequence's ``error``; empty: none."""
    return seq.automaton.constraint.field if seq.automaton is not None and seq.error else ""


def usage_of(seq: Sequence) -> sampling_pb2.Usage:
    """What a sequence cost so far."""
    return sampling_pb2.Usage(
        prompt_tokens=seq.num_prompt_tokens - seq.num_emitted,
        completion_tokens=seq.num_output,
        cached_tokens=seq.num_cached_tokens or 0,
    )


def logprobs_message(rows: list[TokenLogprobs]) -> sampling_pb2.Logprobs:
    """Log-probabilities of consecutive tokens, at least one, in columns."""
    return sampling_pb2.Logprobs(
        logprobs=[row.logprob for row in rows],
        top_count=len(rows[0].top_ids),
        top_token_ids=[token_id for row in rows for token_id in row.top_ids],
        top_logprobs=[logprob for row in rows for logprob in row.top_logprobs],
    )


def _sampling(submit: worker_pb2.Submit, vocab_size: int) -> SamplingParams:
    wire = submit.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        if not wire.HasField(name):
            raise InvalidSubmit(f"sampling.{name} is missing; the router resolves every default")
    params = SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        seed=wire.seed,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(wire.logit_bias.items()),
        allowed_token_ids=tuple(dict.fromkeys(wire.allowed_token_ids)),
        bad_words=tuple(tuple(word.token_ids) for word in submit.bad_words),
        min_tokens=submit.min_tokens,
        logprobs=submit.logprobs if submit.HasField("logprobs") else None,
        prompt_logprobs=submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None,
    )
    ranges = {
        "temperature": (0, 100),
        "top_p": (math.ulp(0.0), 1),
        "min_p": (0, 1),
        "presence_penalty": (-100, 100),
        "frequency_penalty": (-100, 100),
        "repetition_penalty": (1e-2, 1e2),
    }
    for name, (low, high) in ranges.items():
        value = getattr(params, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidSubmit(f"sampling.{name} is {value}; wanted {low} to {high}")
    if not all(math.isfinite(value) for _, value in params.logit_bias):
        raise InvalidSubmit("sampling.logit_bias has a value that is not finite")
    if not all(params.bad_words):
        raise InvalidSubmit("bad_words has an empty word")
    named = [token for token, _ in params.logit_bias] + list(params.allowed_token_ids)
    named += [token for word in params.bad_words for token in word] + list(submit.stop_token_ids)
    if any(token >= vocab_size for token in named):
        raise InvalidSubmit(f"a field names token {max(named)}; the vocabulary has {vocab_size}")
    for top_count in (params.logprobs, params.prompt_logprobs):
        if top_count is not None and top_count > min(MAX_LOGPROBS, vocab_size):
            raise InvalidSubmit(f"{top_count} alternatives are more than {min(MAX_LOGPROBS, vocab_size)}")
    return params

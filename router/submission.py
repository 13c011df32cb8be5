"""What a worker is told of a sequence: everything that its request leaves open is resolved.

A choice that was begun on another worker goes on where it was: its output so far follows the prompt.
"""

from protos import sampling_pb2, worker_pb2
from router.request import Choice, pack_ids


def submission(choice: Choice) -> worker_pb2.Submit:
    """The Submit of a choice, apart from its slot, generation and time left."""
    request = choice.request
    params = request.params
    submit = worker_pb2.Submit(
        request_id=request.id,
        prompt_token_ids=request.prompt + pack_ids(choice.token_ids),
        num_emitted=len(choice.token_ids),
        sampling=sampling_pb2.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=choice.seed,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            **params.constraint,  # type: ignore[arg-type]
        ),
        min_tokens=min(params.min_tokens, request.max_tokens),
        bad_words=[worker_pb2.TokenSequence(token_ids=ids) for ids in request.bad_word_ids],
        max_tokens=request.max_tokens,
        stop_token_ids=sorted(params.eos_token_ids | params.stop_token_ids),
        cache_salt=params.cache_salt,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        priority=params.priority,
        traceparent=request.trace.traceparent,
    )
    if params.logprobs is not None:
        submit.logprobs = params.logprobs
    if params.prompt_logprobs is not None and choice.index == 0 and not request.has_prompt_logprobs:
        submit.prompt_logprobs = params.prompt_logprobs  # one report is enough for all choices
    return submit

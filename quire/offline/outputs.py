"""What becomes of a request, as the caller sees it: vLLM's names, values only. Needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability.

    Attributes:
        logprob: natural, under the model's own distribution.
        rank: 1 is the likeliest; None for a token that is not among the reported alternatives.
        decoded_token: its text; None without detokenizing.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


# The token itself first, then the likeliest, likeliest first.
TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: which of the request's ``n``.
        text: without what ended it.
        token_ids: with the token that ended it.
        cumulative_logprob: sum over all its tokens so far; None when ``logprobs`` were not asked for.
        logprobs: one for each token id; None when they were not asked for.
        finish_reason: stop or length; None while it goes on.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether it is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When what happened, in seconds of ``time.monotonic``; None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request as far as it got.

    Attributes:
        prompt: its text; None when only ids were given.
        prompt_logprobs: one for each prompt token, of which the first has none; None when they were not asked for.
        outputs: its continuations; with output kind DELTA, those with something new.
        num_cached_tokens: prompt tokens found in the prefix cache, by the continuation that found fewest.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int

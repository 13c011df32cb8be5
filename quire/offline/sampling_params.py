"""How a request is sampled and when it ends: vLLM's names, the router's rules. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

from protos import inference_pb2, sampling_pb2
from quire.offline.field_errors import naming_fields
from quire.offline.structured_outputs import StructuredOutputsParams
from router.validation import check_generate

_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
# What is least of each. The wire has no sign.
_COUNTS = {
    **{"n": 1, "max_tokens": 1, "min_tokens": 0, "logprobs": 0, "prompt_logprobs": 0},
    **{"top_k": -1, "seed": -(2**63)},
}
_MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
_FLAGS = (
    *("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"),
    "skip_reading_prefix_cache",
)
_UINT32 = 2**32


class RequestOutputKind(Enum):
    """What the RequestOutputs of one request carry."""

    CUMULATIVE = 0
    """Each has all output so far."""
    DELTA = 1
    """Each has what is new since the one before."""
    FINAL_ONLY = 2
    """There is one, at the end."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request is sampled and when it ends. Checked when it is made.

    Attributes:
        n: continuations of the prompt. Continuation i is sampled with ``seed + i``.
        temperature: 0 is greedy.
        top_k: 0 or -1 is off.
        seed: None draws one; output is a function of it, the prompt and these values, in any batch.
        presence_penalty, frequency_penalty: subtracted for tokens of the output.
        repetition_penalty: divides, for tokens of the prompt too.
        logit_bias: by token id.
        allowed_token_ids: all others are impossible.
        bad_words: texts that the output does not contain.
        max_tokens: None is as many as the context has room for.
        min_tokens: the end is impossible before, and stop strings that are complete by then do not count.
        stop, stop_token_ids: end the output, and are not part of its text unless ``include_stop_str_in_output``.
        ignore_eos: go on past the model's own end of sequence.
        logprobs, prompt_logprobs: alternatives to report for each token of output or prompt; None reports nothing.
        structured_outputs: what the whole output must be.
        skip_reading_prefix_cache: compute the whole prompt, though a prefix of it is cached.
        skip_special_tokens: leave the model's special tokens out of the text.
        detokenize: without it, the output has ids and no text.
        output_kind: what ``LLMEngine.step`` returns; ``LLM`` returns whole outputs.

    Raises:
        ValueError: a field is wrong; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_reading_prefix_cache: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_types()
        if self.stop and not self.detokenize:
            raise ValueError("stop has strings, which are looked for in text: they need detokenize=True")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty, so that no token were possible; None allows all")
        # Whether ids are in the vocabulary is known once there is a model.
        with naming_fields():
            check_generate(self.to_request(), frozenset(), _UINT32)

    def to_request(self) -> inference_pb2.GenerateRequest:
        """The request to the router that says the same, without a prompt."""
        sampling = sampling_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed % 2**64,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
        )
        if self.structured_outputs is not None:
            self.structured_outputs.put(sampling)
        stopping = sampling_pb2.StopConditions(
            max_tokens=self.max_tokens,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            min_tokens=self.min_tokens,
            bad_words=self.bad_words,
        )
        output = inference_pb2.OutputOptions(
            text=self.detokenize,
            token_ids=True,
            final_only=self.output_kind is RequestOutputKind.FINAL_ONLY,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
        return inference_pb2.GenerateRequest(
            sampling=sampling,
            stopping=stopping,
            n=self.n,
            output=output,
            skip_reading_prefix_cache=self.skip_reading_prefix_cache,
        )

    def _check_types(self) -> None:
        """What the wire's messages cannot hold, and would refuse without a name."""
        for name in _NUMBERS:
            _check(name, _is_number(getattr(self, name)), getattr(self, name), "a number")
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            most = 2**64 if name == "seed" else _UINT32
            _check(name, is_whole(value, least, most), value, f"a whole number, at least {least} and below {most}")
        for name in _FLAGS:
            _check(name, isinstance(getattr(self, name), bool), getattr(self, name), "True or False")
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            single = name == "stop" and isinstance(value, str)
            _check(name, value is None or single or _all(value, lambda item: isinstance(item, str)), value, "strings")
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            _check(name, value is None or _all(value, is_token_id), value, "a list of token ids")
        bias = self.logit_bias
        right = bias is None or (isinstance(bias, Mapping) and all(map(is_token_id, bias)))
        right = right and all(map(_is_number, (bias or {}).values()))
        _check("logit_bias", right, bias, "a dict from token ids to numbers")
        structured = self.structured_outputs
        right = structured is None or isinstance(structured, StructuredOutputsParams)
        _check("structured_outputs", right, structured, "StructuredOutputsParams")
        _check("output_kind", isinstance(self.output_kind, RequestOutputKind), self.output_kind, "a RequestOutputKind")


def is_token_id(value: Any) -> bool:
    """Whether a value could be a token's id in some vocabulary."""
    return is_whole(value, 0, _UINT32)


def _check(name: str, right: bool, value: object, wanted: str) -> None:
    if not right:
        raise ValueError(f"{name} is {value!r}; it must be {wanted}")


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def is_whole(value: Any, least: int, end: int) -> bool:
    """Whether a value is an integer from ``least`` to below ``end``; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) < end


def _all(value: Any, right: Any) -> bool:
    """Whether a value is a sequence, but not a string, of right items."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(right, value))

"""What --speculative-config says, in vLLM's JSON form. Knows no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = ("ngram", "draft_model")
_MAX_TOKENS = 32
_LOOKUP = 5
_FIELDS = {"ngram": ("prompt_lookup_max", "prompt_lookup_min"), "draft_model": ("model",)}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made.

    Attributes:
        method: ``ngram`` copies what followed the same tokens earlier in the sequence; ``draft_model`` asks a smaller
            model.
        num_speculative_tokens: most drafts of a sequence in a step.
        prompt_lookup_max, prompt_lookup_min: longest and shortest run of last tokens that is looked for.
        model: the draft model's folder or .gguf file; None for ``ngram``.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = _LOOKUP
    prompt_lookup_min: int = _LOOKUP
    model: Path | None = None


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Reads a JSON object such as ``{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}``.

    As in vLLM, of ``prompt_lookup_max`` and ``prompt_lookup_min`` one alone stands for both, and without them both
    are 5.

    Raises:
        ValueError: it is no such object; the message names the field.
    """
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    method = raw.get("method")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; supported: {', '.join(METHODS)}")
    known = ("method", "num_speculative_tokens", *_FIELDS[method])
    for name in raw:
        if name not in known:
            raise ValueError(f"{name} is not known to method {method}; it takes {', '.join(known)}")
    count = _whole_number(raw, "num_speculative_tokens", None)
    if count > _MAX_TOKENS:
        raise ValueError(f"num_speculative_tokens is {count}; it may be {_MAX_TOKENS} at most")
    if method == "draft_model":
        model = raw.get("model")
        if not isinstance(model, str) or not model:
            raise ValueError(f"model is {model!r}; method draft_model needs the draft model's folder or .gguf file")
        return SpeculativeConfig(method, count, model=Path(model))
    longest = _whole_number(raw, "prompt_lookup_max", raw.get("prompt_lookup_min", _LOOKUP))
    shortest = _whole_number(raw, "prompt_lookup_min", longest)
    if shortest > longest:
        raise ValueError(f"prompt_lookup_min is {shortest}, above prompt_lookup_max {longest}")
    return SpeculativeConfig(method, count, longest, shortest)


def _whole_number(raw: dict[str, Any], name: str, default: int | None) -> int:
    value = raw.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1")
    return value

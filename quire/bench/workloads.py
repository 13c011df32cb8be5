"""Requests that are made up: lengths and prefixes as the workload has them, words or token ids at random."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quire.bench.records import Job, Prompt, Session

# What prompts are: ids where a server takes them, as only these have exact lengths.
Form = Literal["ids", "text", "messages"]

WORKLOADS = {
    "random": "prompts of --input-len and outputs of --output-len tokens, each up to --range-ratio shorter or longer",
    "mixed": "lognormal lengths around --input-len (default 220) and --output-len (180), as of mixed offline work",
    "prefix": "as random, after one of --num-prefixes shared prefixes of --prefix-len tokens",
    "sessions": "conversations of --turns requests, each of them all before it and --input-len tokens more",
}
_DEFAULT_LENGTHS = {"random": (1024, 256), "mixed": (220, 180), "prefix": (64, 256), "sessions": (128, 128)}
_FIRST_ID = 300  # what is below may be control tokens or single bytes
# Words that are a token each in the vocabularies that people use.
_WORDS = (  # noqa: SIM905
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face level office door health person art war history party result change morning reason research girl "
    "moment air teacher force education foot boy age policy music market sense nation plan college interest death"
).split()


@dataclass(frozen=True)
class Shape:
    """What a workload's requests look like; lengths are tokens. See ``WORKLOADS`` and the flags of their names."""

    workload: str = "random"
    input_len: int | None = None
    output_len: int | None = None
    range_ratio: float = 0.0
    num_prefixes: int = 1
    prefix_len: int = 2048
    turns: int = 4

    @property
    def lengths(self) -> tuple[int, int]:
        """Of input and output: what is typical of the workload, where no flag says otherwise."""
        typical = _DEFAULT_LENGTHS[self.workload]
        return self.input_len or typical[0], self.output_len or typical[1]


def mixed_lengths(
    count: int, rng: np.random.Generator, input_median: int = 220, output_median: int = 180
) -> tuple[list[int], list[int]]:
    """Lognormal lengths of prompts and outputs, as offline work has them: many short ones and a few very long."""
    inputs = np.clip(np.round(rng.lognormal(np.log(input_median), 1.0, count)), 4, 2048)
    outputs = np.clip(np.round(rng.lognormal(np.log(output_median), 0.8, count)), 4, 1024)
    return inputs.astype(int).tolist(), outputs.astype(int).tolist()


class Prompts:
    """Random prompts, never the same twice, so that none finds another's cached.

    Args:
        form: what they are.
        vocab_size: ids lie below it.
        rng: draws them.
    """

    def __init__(self, form: Form, vocab_size: int, rng: np.random.Generator) -> None:
        self._form, self._rng = form, rng
        self._ids = (min(_FIRST_ID, vocab_size // 2), vocab_size)

    def draw(self, length: int) -> list[int] | str:
        """Token ids, or as many words."""
        if self._form == "ids":
            ids: list[int] = self._rng.integers(*self._ids, size=length).tolist()
            return ids
        return " ".join(_WORDS[place] for place in self._rng.integers(len(_WORDS), size=length))

    def as_prompt(self, drawn: list[int] | str, prefix: list[int] | str | None = None) -> Prompt:
        """A whole prompt; the prefix of messages is the system's."""
        if self._form == "messages":
            system = [] if prefix is None else [{"role": "system", "content": prefix}]
            return [*system, {"role": "user", "content": drawn}]
        if isinstance(drawn, str):
            return drawn if prefix is None else f"{prefix} {drawn}"
        return drawn if prefix is None else [*prefix, *drawn]


def make_sessions(shape: Shape, count: int, form: Form, vocab_size: int, seed: int) -> list[Session]:
    """So many requests of a workload, in sessions; of ``sessions``, the last may be shorter."""
    # Lengths have a generator of their own: they are the same whatever the form of the prompts.
    lengths, prompts = np.random.default_rng(seed), Prompts(form, vocab_size, np.random.default_rng([seed, 1]))
    jobs = _jobs(shape, count, prompts, lengths)
    if shape.workload != "sessions":
        return [Session((job,)) for job in jobs]
    made = list(jobs)
    return [Session(tuple(made[place : place + shape.turns])) for place in range(0, count, shape.turns)]


def _jobs(shape: Shape, count: int, prompts: Prompts, rng: np.random.Generator) -> Iterator[Job]:
    input_len, output_len = shape.lengths
    inputs: Sequence[int]
    outputs: Sequence[int]
    if shape.workload == "mixed":
        inputs, outputs = mixed_lengths(count, rng, input_len, output_len)
    else:
        inputs, outputs = (_uniform(mean, shape.range_ratio, count, rng) for mean in (input_len, output_len))
    prefixes = [prompts.draw(shape.prefix_len) for _ in range(shape.num_prefixes)] if shape.workload == "prefix" else []
    chosen = rng.integers(max(1, len(prefixes)), size=count)
    for number, (length, output) in enumerate(zip(inputs, outputs, strict=True)):
        prefix = prefixes[chosen[number]] if prefixes else None
        yield Job(prompts.as_prompt(prompts.draw(length), prefix), output)


def _uniform(mean: int, ratio: float, count: int, rng: np.random.Generator) -> list[int]:
    low, high = max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio)))
    drawn: list[int] = rng.integers(low, high, endpoint=True, size=count).tolist()
    return drawn

"""What an output must be: vLLM's names. Needs no torch."""

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from protos import sampling_pb2


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole output must be: exactly one of these.

    Attributes:
        json: JSON that fits this schema, a dict or its text.
        regex: text that matches as a whole; syntax of Rust's regex crate.
        choice: one of these texts.
        grammar: text of a grammar, as Lark writes it or in EBNF as GBNF does.
        json_object: any JSON object, when True.

    Raises:
        ValueError: none or several are given, or one is of a wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(
                f"structured_outputs has {found} of json, regex, choice, grammar and json_object; give one"
            )
        for name, right, wanted in (
            ("json", isinstance(self.json, str | Mapping), "a schema: a dict, or its text"),
            ("regex", isinstance(self.regex, str), "a string"),
            ("choice", isinstance(self.choice, Sequence) and _are_texts(self.choice), "a list of strings"),
            ("grammar", isinstance(self.grammar, str), "a string"),
            ("json_object", self.json_object is True, "True"),
        ):
            if name in given and not right:
                raise ValueError(f"structured_outputs.{name} is {getattr(self, name)!r}; it must be {wanted}")
        try:
            self.put(sampling_pb2.SamplingParams())
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.{given[0]} cannot be written down: {error}") from error

    def put(self, sampling: sampling_pb2.SamplingParams) -> None:
        """Writes it into a request's parameters."""
        if self.json is not None:
            schema = self.json if isinstance(self.json, str) else json_format.dumps(dict(self.json), ensure_ascii=False)
            sampling.json_schema = schema
        elif self.regex is not None:
            sampling.regex = self.regex
        elif self.choice is not None:
            sampling.choices.texts.extend(self.choice)
        elif self.grammar is not None:
            sampling.grammar = self.grammar
        else:
            sampling.json_object = True


def _are_texts(texts: Sequence[str]) -> bool:
    return not isinstance(texts, str) and all(isinstance(text, str) for text in texts)

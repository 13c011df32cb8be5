"""Makes of a choice's text what the client gets: content, reasoning and calls of tools, as deltas and as a message."""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.generation import Ending
from gateway.output_check import OutputCheck, SchemaCheck, violation
from gateway.output_policy.part_filter import PartFilter
from gateway.output_policy.text_filter import CompiledPolicy
from gateway.parts import Arguments, CallStart, Content, Part, Reasoning
from gateway.reasoning import ReasoningTokens
from gateway.text_machine import TextMachine

Delta = dict[str, Any]
"""The ``delta`` of a chunk."""


@dataclass(frozen=True)
class OutputPlan:
    """How the outputs of one request are read.

    Attributes:
        check: what a complete output must be.
        reasoning, tools: make the parser of a choice; None: there is nothing to tell apart.
        reasoning_tokens: makes what counts the tokens of a choice's reasoning; is there with ``reasoning``.
        calls_only: a grammar lets a choice be nothing but calls.
        strict: checks of calls' arguments, by the function's name.
    """

    check: OutputCheck
    reasoning: Callable[[], TextMachine] | None = None
    tools: Callable[[], TextMachine] | None = None
    strict: Mapping[str, SchemaCheck] = field(default_factory=dict)
    reasoning_tokens: Callable[[], ReasoningTokens] | None = None
    calls_only: bool = False

    @property
    def splits(self) -> bool:
        """Whether a message may have other parts than content."""
        return self.reasoning is not None or self.tools is not None


@dataclass
class Call:
    """A call of a tool, as far as it has come."""

    id: str
    name: str
    pieces: list[str]

    @property
    def arguments(self) -> str:
        """The JSON text."""
        return "".join(self.pieces)


class OutputReader:
    """Reads one choice.

    Args:
        plan: how.
        policy: what the text has been filtered by; what comes of calls is held to it too.

    Attributes:
        content, reasoning: pieces of text.
        calls: of tools.
    """

    def __init__(self, plan: OutputPlan, policy: CompiledPolicy | None = None) -> None:
        self._plan = plan
        # Errors would quote decoded JSON, which nobody has looked at.
        self._quotes = policy is None
        self._filter: PartFilter | None = None
        if policy is not None and policy.patterns is not None and plan.tools is not None:
            self._filter = PartFilter(policy)
        self._reasoning = plan.reasoning() if plan.reasoning is not None else None
        self._tools = plan.tools() if plan.tools is not None else None
        self._whole: list[str] = []
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[Call] = []

    @property
    def ended(self) -> bool:
        """Whether the policy has ended the output: nothing that comes now is shown."""
        return self._filter is not None and self._filter.ended

    def push(self, text: str) -> list[Delta]:
        """What new text adds to the message."""
        if self._plan.check:
            self._whole.append(text)
        parts: list[Part] = [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        return self._deltas(self._allowed(self._after_reasoning(parts)))

    def finish(self, ending: Ending) -> tuple[list[Delta], Ending]:
        """What the end adds, and the ending as the client gets it.

        Raises:
            ApiError (500): the output is complete and not what it must be. One that the client's own stop string or
                stop token ended, or a limit, is not complete.
        """
        parts = self._after_reasoning([] if self._reasoning is None else self._reasoning.finish())
        if self._tools is not None:
            parts += self._tools.finish()
        if self._plan.calls_only and (ending.reason != "stop" or ending.stop_reason is not None):
            # A call that was cut before its name was whole is no text for the reader.
            parts = [part for part in parts if not isinstance(part, Content)]
        parts = self._allowed(parts)
        if self._filter is not None:
            parts += self._filter.finish()
            if self._filter.matched:
                ending = Ending("content_filter", None)
        deltas = self._deltas(parts)
        if ending.reason != "stop":
            return deltas, ending
        if ending.stop_reason is None:
            self._plan.check.check("".join(self._whole), quotes=self._quotes)
        if self.calls and (ending.stop_reason is None or _is_json(self.calls[-1].arguments)):
            for call in self.calls:
                self._check_strict(call)
            ending = replace(ending, reason="tool_calls")
        return deltas, ending

    def _after_reasoning(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        through: list[Part] = []
        for part in parts:
            through += self._tools.push(part.text) if isinstance(part, Content) else [part]
        return through

    def _allowed(self, parts: list[Part]) -> list[Part]:
        return parts if self._filter is None else self._filter.push(parts)

    def _deltas(self, parts: list[Part]) -> list[Delta]:
        return [self._delta(part) for part in parts]

    def _delta(self, part: Part) -> Delta:
        """Takes a part into the message."""
        if isinstance(part, Content):
            self.content.append(part.text)
            return {"content": part.text}
        if isinstance(part, Reasoning):
            self.reasoning.append(part.text)
            return {"reasoning_content": part.text}
        if isinstance(part, CallStart):
            call = Call(f"call_{uuid.uuid4().hex[:24]}", part.name, [])
            self.calls.append(call)
            place = {"index": len(self.calls) - 1, "id": call.id, "type": "function"}
            return {"tool_calls": [{**place, "function": {"name": call.name, "arguments": ""}}]}
        assert isinstance(part, Arguments)
        self.calls[-1].pieces.append(part.text)
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": part.text}}]}

    def _check_strict(self, call: Call) -> None:
        check = self._plan.strict.get(call.name)
        if check is not None and (fault := check.fault(call.arguments)):
            raise violation(f"The model's call of {call.name} does not fit its parameters: {fault}.")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True

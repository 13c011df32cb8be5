"""Answers as OpenAI's chat and text completions have them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.answering import Choice
from gateway.chunks import CHAT, COMPLETION, Chunks, Shape
from gateway.generation import Generation
from gateway.preparing import Prepared
from gateway.replies import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    TextChoice,
    TextLogprobs,
    ToolCall,
)
from gateway.stream import usage_of


@dataclass(frozen=True)
class _OpenAiForm:
    prepared: Prepared
    # Seconds since 1970.
    created: int = field(default_factory=lambda: int(time.time()))

    def _chunks(self, shape: Shape, generation: Generation) -> Chunks:
        return Chunks(
            shape,
            id=self.prepared.id,
            created=self.created,
            model=self.prepared.body.model,
            num_choices=generation.num_choices,
            include_usage=self.prepared.body.include_usage(),
            service_tier=self.prepared.tier(),
        )


class ChatForm(_OpenAiForm):
    """Chat completions."""

    def whole(self, choices: Sequence[Choice], generation: Generation) -> ChatCompletion:
        """The complete reply."""
        messages = [
            ChatChoice(
                index=index,
                message=_message(choice),
                logprobs=None if choice.logprobs is None else ChatLogprobs.model_validate(choice.logprobs),
                finish_reason=choice.ending.reason,
                stop_reason=choice.ending.stop_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return ChatCompletion(
            id=self.prepared.id,
            created=self.created,
            model=self.prepared.body.model,
            choices=messages,
            usage=usage_of(generation),
            service_tier=self.prepared.tier(),
        )

    def writer(self, generation: Generation) -> Chunks:
        """Writes chunks."""
        return self._chunks(CHAT, generation)


class CompletionForm(_OpenAiForm):
    """Text completions."""

    def whole(self, choices: Sequence[Choice], generation: Generation) -> Completion:
        """The complete reply."""
        texts = [
            TextChoice(
                index=index,
                text=choice.text,
                logprobs=None if choice.logprobs is None else TextLogprobs.model_validate(choice.logprobs),
                finish_reason=choice.ending.reason,
                stop_reason=choice.ending.stop_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return Completion(
            id=self.prepared.id,
            created=self.created,
            model=self.prepared.body.model,
            choices=texts,
            usage=usage_of(generation),
        )

    def writer(self, generation: Generation) -> Chunks:
        """Writes chunks."""
        return self._chunks(COMPLETION, generation)


def _message(choice: Choice) -> AssistantMessage:
    calls = [
        ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in choice.output.calls
    ]
    return AssistantMessage(
        content=choice.text or (None if calls else ""),
        reasoning_content="".join(choice.output.reasoning) or None,
        tool_calls=calls or None,
    )

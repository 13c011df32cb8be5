"""The authoritative record of a request: its prompt, its parameters, and the output of each choice so far.

A worker is a cache: whatever a client was promised can be worked out from here.
"""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from protos import inference_pb2, sampling_pb2
from router.detokenizer import Detokenizer, StopMatcher
from router.errors import RequestError


class ProtocolError(Exception):
    """A worker broke the rules of the stream; its link must be made anew."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """A request's parameters with every default filled in. Units and meaning as in protos/sampling.proto."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    n: int
    text: bool
    token_ids: bool
    final_only: bool


class Request:
    """One Generate call.

    Args:
        request_id: unique among running requests.
        prompt: token ids.
        parameters: resolved.
        cache_salt: root of the prefix cache's chain.
        deadline: monotonic seconds, or None.
        detokenizers: one for each choice.
    """

    def __init__(
        self,
        request_id: str,
        prompt: "array[int]",
        parameters: Parameters,
        cache_salt: bytes,
        deadline: float | None,
        detokenizers: Sequence[Detokenizer],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.parameters = parameters
        self.cache_salt = cache_salt
        self.deadline = deadline
        self.choices = [Choice(self, index, detokenizer) for index, detokenizer in enumerate(detokenizers)]
        self.error: RequestError | None = None
        self.changed = asyncio.Event()

    def fail(self, error: RequestError) -> None:
        """Ends the whole request; its call ends with this error. The first one counts."""
        self.error = self.error or error
        self.changed.set()

    @property
    def finished(self) -> bool:
        return self.error is not None or all(choice.finish_reason for choice in self.choices)

    def usage(self) -> sampling_pb2.Usage:
        """Tokens of all choices together, as far as they got."""
        return sampling_pb2.Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=sum(choice.num_emitted for choice in self.choices),
            cached_tokens=max(choice.cached_tokens for choice in self.choices),
        )

    def take_events(self) -> list[inference_pb2.GenerateResponse]:
        """What became known since the last call: for each choice at most one Delta, and its Finished."""
        return [event for choice in self.choices for event in choice.take_events()]


class Choice:
    """One continuation of a request's prompt.

    Attributes:
        num_emitted: output tokens accepted so far: the only index that may come next.
        cached_tokens: prompt tokens that the worker had in its cache.
        finish_reason: set once it is complete; 0 before.
    """

    def __init__(self, request: Request, index: int, detokenizer: Detokenizer) -> None:
        parameters = request.parameters
        self.request = request
        self.index = index
        self.num_emitted = 0
        self.cached_tokens = 0
        self.finish_reason: sampling_pb2.FinishReason = sampling_pb2.FINISH_REASON_UNSPECIFIED
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(parameters.stop, parameters.include_stop_str_in_output) if parameters.stop else None
        self._silent = frozenset(() if parameters.include_stop_str_in_output else parameters.stop_token_ids)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._first_index = 0
        self._finished: inference_pb2.Finished | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met, if one was."""
        return self._matcher.matched if self._matcher else None

    def accept(self, first_index: int, token_ids: list[int]) -> None:
        """Takes in new output. Tokens that are already known are dropped.

        Raises:
            ProtocolError: tokens are missing before these.
        """
        if first_index > self.num_emitted:
            raise ProtocolError(f"output goes on at {first_index}, expected {self.num_emitted}")
        token_ids = token_ids[self.num_emitted - first_index :]
        if self.finish_reason or not token_ids:
            return
        if self._matcher is None:
            self.num_emitted += len(token_ids)
            self._text.append(self._detokenizer.push(self._spoken(token_ids)))
        else:
            token_ids = self._push_matching(self._matcher, token_ids)
        if self.request.parameters.token_ids:
            self._token_ids += token_ids
        if self.stop_string is not None:
            self.finish(sampling_pb2.FINISH_REASON_STOP, None)
        else:
            self._announce()

    def _push_matching(self, matcher: StopMatcher, token_ids: list[int]) -> list[int]:
        """Takes tokens one by one up to the one that completes a stop string; returns those taken."""
        for count, token_id in enumerate(token_ids, start=1):
            self.num_emitted += 1
            self._text.append(matcher.push(self._detokenizer.push(self._spoken([token_id]))))
            if matcher.matched is not None:
                return token_ids[:count]
        return token_ids

    def _spoken(self, token_ids: list[int]) -> list[int]:
        """The tokens that make text: a stop token, which is always the last, does so only on request."""
        if token_ids[-1] in self._silent:
            return token_ids[:-1]
        return token_ids

    def finish(self, reason: sampling_pb2.FinishReason, stop_token_id: int | None) -> None:
        """Completes the choice; text that was held back goes out. Does nothing when it is complete."""
        if self.finish_reason:
            return
        self.finish_reason = reason
        finished = inference_pb2.Finished(
            index=self.index,
            reason=reason,
            usage=sampling_pb2.Usage(
                prompt_tokens=len(self.request.prompt),
                completion_tokens=self.num_emitted,
                cached_tokens=self.cached_tokens,
            ),
        )
        if self.stop_string is not None:
            finished.stop_string = self.stop_string
        else:
            self._flush()
            if stop_token_id is not None and stop_token_id not in self.request.parameters.eos_token_ids:
                finished.stop_token_id = stop_token_id
        self._finished = finished
        self.request.changed.set()

    def _flush(self) -> None:
        rest = self._detokenizer.flush()
        if self._matcher is not None:
            rest = self._matcher.push(rest) + self._matcher.flush()
        self._text.append(rest)

    def _announce(self) -> None:
        if not self.request.parameters.final_only:
            self.request.changed.set()

    def take_events(self) -> list[inference_pb2.GenerateResponse]:
        """At most one Delta with all that is pending, and Finished once."""
        events = []
        parameters = self.request.parameters
        if self._finished is not None or not parameters.final_only:
            text = "".join(self._text) if parameters.text else ""
            if text or self._token_ids:
                delta = inference_pb2.Delta(
                    index=self.index, text=text, first_index=self._first_index, token_ids=self._token_ids
                )
                events.append(inference_pb2.GenerateResponse(delta=delta))
            self._first_index += len(self._token_ids)
            self._text, self._token_ids = [], []
        if self._finished is not None:
            events.append(inference_pb2.GenerateResponse(finished=self._finished))
            self._finished = None
        return events

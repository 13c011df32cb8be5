"""One request in the engine: the router's record of it, and the outputs that the caller has been told of."""

import dataclasses
from collections.abc import Iterable, Iterator

from protos import inference_pb2, sampling_pb2
from quire.offline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from quire.offline.sampling_params import RequestOutputKind, SamplingParams
from router.request import Choice, Request, unpack_ids
from worker.sequence import Sequence

_FINISH_REASONS = {sampling_pb2.FINISH_REASON_STOP: "stop", sampling_pb2.FINISH_REASON_LENGTH: "length"}


class RequestRecord:
    """One request from its arrival to its last output.

    Args:
        request: begun, that is with its prompt's ids.
        prompt: the text that its outputs show.
        params: what was asked.
        sequences: those that compute the request's choices.
        arrival_time: in seconds of ``time.monotonic``.
    """

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        params: SamplingParams,
        sequences: list[tuple[Sequence, Choice]],
        arrival_time: float,
    ) -> None:
        self.request = request
        self.sequences = sequences
        self.metrics = RequestMetrics(arrival_time)
        self._prompt = prompt
        self._prompt_token_ids = unpack_ids(request.prompt)
        self._kind = params.output_kind
        self._shows_text = params.detokenize
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._outputs = [_growing(choice.index, params) for choice in request.choices]

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.request.id

    def next_output(self, now: float) -> RequestOutput | None:
        """What the caller is to be told after a step that ended at ``now``; None: nothing."""
        changed: set[int] = set()
        for event in self.request.take_unsent():
            match event.WhichOneof("event"):
                case "prompt_logprobs":
                    report = event.prompt_logprobs
                    self._prompt_logprobs = [None, *self._logprobs(report.token_ids[1:], report.logprobs, skip=1)]
                case "delta":
                    self._add(event.delta)
                    changed.add(event.delta.index)
                case "finished":
                    self._finish(event.finished)
                    changed.add(event.finished.index)
        ended = self.request.ended
        if any(choice.token_ids for choice in self.request.choices):
            self.metrics.first_token_time = self.metrics.first_token_time or now
            self.metrics.last_token_time = now
        if ended:
            self.metrics.finished_time = now
        if not changed or (self._kind is RequestOutputKind.FINAL_ONLY and not ended):
            return None
        shown = changed if self._kind is RequestOutputKind.DELTA else range(len(self._outputs))
        return RequestOutput(
            request_id=self.request.id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[self._show(index) for index in sorted(shown)],
            finished=ended,
            metrics=dataclasses.replace(self.metrics),
            num_cached_tokens=min(choice.cached_tokens for choice in self.request.choices),
        )

    def _add(self, delta: inference_pb2.Delta) -> None:
        output = self._outputs[delta.index]
        logprobs, total = output.logprobs, output.cumulative_logprob
        if logprobs is not None and total is not None:
            logprobs = [*logprobs, *self._logprobs(delta.token_ids, delta.logprobs)]
            total += sum(delta.logprobs.logprobs)
        self._outputs[delta.index] = dataclasses.replace(
            output,
            text=output.text + delta.text,
            token_ids=[*output.token_ids, *delta.token_ids],
            logprobs=logprobs,
            cumulative_logprob=total,
        )

    def _finish(self, finished: inference_pb2.Finished) -> None:
        cause = finished.WhichOneof("stop_cause")
        self._outputs[finished.index] = dataclasses.replace(
            self._outputs[finished.index],
            finish_reason=_FINISH_REASONS[finished.reason],
            stop_reason=None if cause is None else getattr(finished, cause),
        )

    def _show(self, index: int) -> CompletionOutput:
        """A continuation for the caller, whose lists nobody changes any more."""
        output = self._outputs[index]
        if self._kind is RequestOutputKind.DELTA:
            told = dataclasses.replace(output, text="", token_ids=[])
            self._outputs[index] = told if output.logprobs is None else dataclasses.replace(told, logprobs=[])
        return output

    def _logprobs(
        self, token_ids: Iterable[int], wire: sampling_pb2.Logprobs, skip: int = 0
    ) -> Iterator[TokenLogprobs]:
        """The wire's columns, token by token; the first ``skip`` log-probabilities have no token here."""
        count = wire.top_count
        for place, (token_id, logprob) in enumerate(zip(token_ids, wire.logprobs[skip:], strict=True)):
            entry = {token_id: Logprob(logprob, None, self._text(token_id))}
            places = range(place * count, (place + 1) * count)
            rank = 1
            for before, at in enumerate(places):
                if before and wire.top_logprobs[at] < wire.top_logprobs[at - 1]:
                    rank = before + 1  # equal ones share a rank
                top_id = wire.top_token_ids[at]
                entry[top_id] = Logprob(wire.top_logprobs[at], rank, self._text(top_id))
            yield entry

    def _text(self, token_id: int) -> str | None:
        return self.request.token_bytes.shown(token_id).decode("utf-8", "replace") if self._shows_text else None


def _growing(index: int, params: SamplingParams) -> CompletionOutput:
    """A continuation without tokens."""
    if params.logprobs is None:
        return CompletionOutput(index, "", [])
    return CompletionOutput(index, "", [], cumulative_logprob=0.0, logprobs=[])

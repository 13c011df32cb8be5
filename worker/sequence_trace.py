"""Spans of what a worker does with a sequence: it waits for a step, its prompt is computed, its output is.

Their parent is the router's span of the request. Times are those at which the event loop hears of a step.
"""

import time
from dataclasses import dataclass

from protos.tracing import NO_SPAN, Attributes, Span, Tracing
from worker.sequence import FinishReason, Sequence

_FAILURES = {
    FinishReason.CANCELLED: "cancelled",
    FinishReason.DEADLINE: "deadline_exceeded",
    FinishReason.ERROR: "engine_error",
}


@dataclass(slots=True)
class _Times:
    """Monotonic seconds of a sequence; None: not yet."""

    parent: Span
    submitted: float
    began: float | None = None
    first_token: float | None = None


class SequenceTracer:
    """Records the sequences of one worker. What is not recorded costs a look into an empty dictionary.

    Args:
        tracing: the process's.
        worker_id: in all spans.
    """

    def __init__(self, tracing: Tracing, worker_id: str) -> None:
        self._tracing = tracing
        self._worker_id = worker_id
        self._times: dict[Sequence, _Times] = {}
        self._last_step_ended = 0.0

    def submitted(self, seq: Sequence, traceparent: str) -> None:
        """A router has sent it."""
        if traceparent:
            parent = self._tracing.join((("traceparent", traceparent),))
            if parent is not NO_SPAN:
                self._times[seq] = _Times(parent, time.monotonic())

    def refused(self, seq: Sequence) -> None:
        """It will not run."""
        self._times.pop(seq, None)

    def admitted(self, seq: Sequence) -> None:
        """The step that ended now was its first: it began when the step before had ended, or when it came."""
        times = self._times.get(seq)
        if times is not None and times.began is None:
            times.began = max(times.submitted, self._last_step_ended)

    def got_tokens(self, seq: Sequence) -> None:
        """It has tokens more."""
        times = self._times.get(seq)
        if times is not None and times.first_token is None:
            times.first_token = time.monotonic()

    def finished(self, seq: Sequence) -> None:
        """It ended, in whatever way: its spans are sent."""
        times = self._times.pop(seq, None)
        if times is None:
            return
        now = time.monotonic()
        error = _FAILURES.get(seq.finish_reason, "") if seq.finish_reason is not None else ""
        named: Attributes = {"quire.worker": self._worker_id}
        if times.began is None:
            times.parent.child("schedule", times.submitted, now, named, error)
            return
        times.parent.child("schedule", times.submitted, times.began, named)
        prefill: Attributes = {
            **named,
            "gen_ai.usage.input_tokens": seq.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": seq.num_cached_tokens or 0,
        }
        if times.first_token is None:
            times.parent.child("prefill", times.began, now, prefill, error)
            return
        times.parent.child("prefill", times.began, times.first_token, prefill)
        decode = {**named, "gen_ai.usage.output_tokens": seq.num_output - seq.num_emitted}
        times.parent.child("decode", times.first_token, now, decode, error)

    def step_ended(self) -> None:
        """All that a step produced was told."""
        self._last_step_ended = time.monotonic()

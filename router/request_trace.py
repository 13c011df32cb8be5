"""A request's way through the router, as spans below the request's own: tokenize, queue, route, migrate.

A choice is in one stage at a time. It waits in ``queue``, or in ``migrate`` once its worker was lost; ``route`` is the
moment in which a worker is found for it. While it runs, the worker's own spans go on: schedule, prefill, decode.
"""

import time
from typing import TYPE_CHECKING

from protos.tracing import NO_SPAN, Attributes, Span

if TYPE_CHECKING:
    from router.request import Choice, Request
    from router.routing.worker_view import Placed


class RequestTrace:
    """Of one Generate call.

    Args:
        span: of the whole call; who began it ends it.
    """

    __slots__ = ("_began", "_span", "_stages", "traceparent")

    def __init__(self, span: Span = NO_SPAN) -> None:
        self._span = span
        self._began = time.monotonic() if span.recording else 0.0
        # The choices that wait: for which reason, since when, and what is known of that.
        self._stages: dict[Choice, tuple[str, float, Attributes]] = {}
        # For the workers that run it.
        self.traceparent = dict(span.carrier).get("traceparent", "") if span.recording else ""

    @property
    def recording(self) -> bool:
        """Whether there is any use in telling it something."""
        return bool(self.traceparent)

    def tokenized(self, request: "Request") -> None:
        """The prompt is known."""
        if self.traceparent:
            counted = {"gen_ai.usage.input_tokens": request.prompt_tokens}
            self._span.set(counted)
            self._span.child("tokenize", self._began, time.monotonic(), counted)

    def waits(self, choice: "Choice") -> None:
        """A choice waits for a worker. One whose worker was lost goes on waiting in that stage."""
        if self.traceparent and choice not in self._stages:
            self._stages[choice] = ("queue", time.monotonic(), {})

    def lost(self, choice: "Choice", worker: str) -> None:
        """The worker that had a choice is lost."""
        if self.traceparent:
            attributes: Attributes = {"quire.lost_worker": worker, "quire.output_tokens": len(choice.token_ids)}
            self._stages[choice] = ("migrate", time.monotonic(), attributes)

    def bound(self, choice: "Choice", placed: "Placed", worker: str, decided: float) -> None:
        """A worker was found for a choice, in a search that began at ``decided`` (monotonic seconds)."""
        if not self.traceparent:
            return
        self._leave(choice, decided)
        self._span.child(
            "route",
            decided,
            time.monotonic(),
            {
                "quire.choice": choice.index,
                "quire.worker": worker,
                "quire.route.reason": placed.reason,
                "quire.route.prompt_tokens": placed.prompt_tokens,
                "quire.route.predicted_cached_tokens": placed.predicted_tokens,
            },
        )

    def ended(self, request: "Request", error: str) -> None:
        """The call is over; ``error`` is the kind of its failure, or empty. To be told before the span is ended."""
        if not self.traceparent:
            return
        now = time.monotonic()
        for choice in list(self._stages):
            self._leave(choice, now, error or "cancelled")
        self._span.set({"gen_ai.usage.output_tokens": sum(len(choice.token_ids) for choice in request.choices)})

    def _leave(self, choice: "Choice", until: float, error: str = "") -> None:
        stage = self._stages.pop(choice, None)
        if stage is not None:
            name, since, attributes = stage
            # A search may have begun a moment before the choice that it found came to the queue.
            self._span.child(name, since, max(since, until), {"quire.choice": choice.index, **attributes}, error)

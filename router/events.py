"""What happens to requests and workers, counted for whoever shows it. Labels have few values."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from router.worker_loss import Verdict

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# How losses of workers turn out, and shutting down, which is none.
SHUT_DOWN = "shut_down"
_CAUSES = (*(verdict.name.lower() for verdict in Verdict if verdict is not Verdict.OPEN), SHUT_DOWN)


class RouterEvents:
    """Counted up since the start.

    Attributes:
        registry: has all of them.
        moves: sequences that went on at another worker, or at the same one again.
        losses: of workers, by ``cause``: died, cut (the connection alone), failed (no answer, or a wrong one) or
            shut_down.
        quarantines: requests that are kept from workers, as some died of them.
        failures: Generate calls that ended with another status than OK, by ``reason``: ErrorInfo's, else the status.
        rests: how often a worker that lost its work again and again was given nothing for a while.
        spans_dropped: parts of traces that their collector did not take.
        queue_time, time_to_first_token: seconds since the request came, of each sequence.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.moves = Counter(
            "quire_router_moves", "Sequences that went on elsewhere after their worker was lost.", registry=registry
        )
        self.losses = Counter(
            "quire_router_worker_losses", "Workers that were lost, by what it turned out to be.", ["cause"],
            registry=registry,
        )  # fmt: skip
        for cause in _CAUSES:
            self.losses.labels(cause)
        self.quarantines = Counter(
            "quire_router_quarantines", "Requests that are kept from workers, as some died of them.", registry=registry
        )
        self.failures = Counter(
            "quire_router_requests_failed", "Generate calls that ended with another status than OK.", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.rests = Counter(
            "quire_router_breaker_openings", "How often a worker that loses its work was given a rest.",
            registry=registry,
        )  # fmt: skip
        self.spans_dropped = Counter(
            "quire_router_trace_spans_dropped", "Spans of traces that could not be sent.", registry=registry
        )
        self.queue_time = Histogram(
            "quire_router_request_queue_time_seconds", "From a request's arrival to a worker, by sequence.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.time_to_first_token = Histogram(
            "quire_router_time_to_first_token_seconds", "From a request's arrival to its first token, by sequence.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip

"""What this process measures, in Prometheus' terms. Suffixes are vLLM's, the prefix is ours; times are seconds."""

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        # The library's switch is one for the process. Dashboards have no use for a second sample of each counter.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.time_to_first_token = Histogram(
            "quire_time_to_first_token_seconds",
            "From the arrival of a streamed request to its first text.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_latency = Histogram(
            "quire_inter_token_latency_seconds",
            "Between two pieces of text of one streamed choice; a piece is a token unless tokens were merged.",
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self.e2e_request_latency = Histogram(
            "quire_e2e_request_latency_seconds",
            "From the arrival of a request to its end, successful requests only.",
            buckets=_E2E_BUCKETS,
            registry=self.registry,
        )
        self.request_success = Counter(
            "quire_request_success_total",
            "Choices that were completed, by finish reason.",
            ["finished_reason"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "quire_prompt_tokens_total", "Prompt tokens of accepted requests.", registry=self.registry
        )
        self.generation_tokens = Counter(
            "quire_generation_tokens_total", "Tokens of completed choices.", registry=self.registry
        )
        self.num_requests_running = Gauge(
            "quire_num_requests_running",
            "Requests that wait for the router or run.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.http_requests = Counter(
            "quire_http_requests_total",
            "Answered HTTP requests; status 499 is a client that went away.",
            ["route", "status"],
            registry=self.registry,
        )

        self.spans_dropped = Counter(
            "quire_trace_spans_dropped_total", "Spans of traces that could not be sent.", registry=self.registry
        )

    def num_running(self) -> int:
        """Requests that wait for the router or run."""
        return int(self._summed().get_sample_value("quire_num_requests_running") or 0)

    def expose(self) -> bytes:
        """All samples in Prometheus' text format."""
        return generate_latest(self._summed())

    def _summed(self) -> CollectorRegistry:
        """The figures of all processes that share the port; see ``processes``."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return self.registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return registry

"""The router's load in Prometheus' terms, for GetMetrics and ``--metrics-port``. Read when asked for, kept nowhere.

Suffixes are vLLM's where it has the same; ``quire_router_`` is the router's own, ``quire_worker_`` what a worker said.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import inference_pb2
from router.events import RouterEvents
from router.load_report import LoadReporter

_Worker = inference_pb2.GetLoadResponse.Worker

_PREDICTIONS: tuple[tuple[str, str, Callable[[inference_pb2.GetLoadResponse.Predictions], int]], ...] = (
    ("sequences", "Sequences that began to run on a worker.", lambda counted: counted.sequences),
    ("predicted_cached_tokens", "Prompt tokens that workers were expected to have cached.",
     lambda counted: counted.predicted_tokens),
    ("cached_tokens", "Prompt tokens that workers had cached.", lambda counted: counted.cached_tokens),
    ("missed_cached_tokens", "Prompt tokens expected to be cached that were not.",
     lambda counted: counted.missed_tokens),
    ("unexpected_cached_tokens", "Prompt tokens that were cached and not expected to be.",
     lambda counted: counted.unexpected_tokens),
)  # fmt: skip

_GAUGES: tuple[tuple[str, str, Callable[[_Worker], float]], ...] = (
    ("num_requests_running", "Sequences in the worker's steps.", lambda worker: worker.running),
    ("num_requests_waiting", "Sequences that the worker holds and that are in no step yet.",
     lambda worker: worker.waiting),
    ("slots_taken", "Sequences of this router that the worker has.", lambda worker: worker.slots_taken),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1; cached ones are not in use.",
     lambda worker: worker.used_blocks / worker.total_blocks if worker.total_blocks else 0.0),
    ("kv_blocks_used", "KV blocks that running sequences hold.", lambda worker: worker.used_blocks),
    ("kv_blocks_cached", "KV blocks that hold reusable prefixes and are free when needed.",
     lambda worker: worker.cached_blocks),
    ("kv_blocks_free", "KV blocks that hold nothing.", lambda worker: worker.free_blocks),
    ("backlog_tokens", "Prompt tokens that the worker has yet to compute.", lambda worker: worker.backlog_tokens),
    ("prefill_tokens_per_second", "How fast the worker computes prompts.",
     lambda worker: worker.prefill_tokens_per_second),
)  # fmt: skip

_COUNTERS: tuple[tuple[str, str, Callable[[_Worker], float]], ...] = (
    ("prefix_cache_queries", "Prompt tokens of sequences that the worker began to run.",
     lambda worker: worker.prefix_cache_queries),
    ("prefix_cache_hits", "Those of them that its prefix cache had.", lambda worker: worker.prefix_cache_hits),
    ("num_preemptions", "Sequences that made room for others and were computed again.",
     lambda worker: worker.preemptions),
    ("spec_decode_num_draft_tokens", "Drafts that the worker verified.", lambda worker: worker.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Drafts that were accepted.", lambda worker: worker.accepted_tokens),
)  # fmt: skip


class RouterCollector(Collector):
    """Samples of one router; the library may ask from any thread.

    Args:
        reporter, events: the router's.
    """

    def __init__(self, reporter: LoadReporter, events: RouterEvents) -> None:
        self._reporter = reporter
        self._events = events.registry
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All samples of this moment."""
        yield from self._events.collect()
        load = self._reporter.report()
        for name, text, count in _PREDICTIONS:
            yield CounterMetricFamily(f"quire_router_{name}", text, count(load.predictions))
        yield GaugeMetricFamily(
            "quire_router_num_requests_waiting", "Requests with choices that no worker has.", load.waiting
        )
        ready = GaugeMetricFamily("quire_worker_ready", "1: the worker takes sequences.", labels=["worker"])
        for worker in load.workers:
            ready.add_metric([worker.address], worker.ready)
        yield ready
        # One that is away has no figures, rather than zeros. Hello grants a slot at least.
        present = [worker for worker in load.workers if worker.max_slots]
        for family, samples in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, value in samples:
                metric = family(f"quire_worker_{name}", text, labels=["worker"])
                for worker in present:
                    metric.add_metric([worker.address], value(worker))
                yield metric

        starts = GaugeMetricFamily(
            "quire_worker_start_seconds", "What the worker's start took.", labels=["worker", "phase"]
        )
        for worker in present:
            for phase, seconds in worker.start_seconds.items():
                starts.add_metric([worker.address, phase], seconds)
        yield starts

    def expose(self) -> bytes:
        """All samples in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Answers GET /metrics on a thread. Raises OSError when the port cannot be used.

        Returns:
            What ends it.
        """
        server, thread = start_http_server(port, host, self._registry)

        def stop() -> None:
            server.shutdown()
            thread.join()
            server.server_close()

        return stop

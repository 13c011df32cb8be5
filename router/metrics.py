"""What the router measures, in Prometheus' terms, for ``--metrics-port``. Read when it is asked for, kept nowhere."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission import WaitingQueue
from router.fleet import Fleet
from router.fleet_view import FleetView


class RouterCollector(Collector):
    """Samples of one router.

    The library asks from a thread of its own: only what is safe to read while the event loop changes it is read here.

    Args:
        fleet, view, queue: the router's.
    """

    def __init__(self, fleet: Fleet, view: FleetView, queue: WaitingQueue) -> None:
        self._fleet = fleet
        self._view = view
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        """All samples of this moment."""
        yield from self._predictions()
        yield GaugeMetricFamily(
            "quire_router_num_requests_waiting", "Requests with choices that no worker has.", len(self._queue)
        )
        yield from self._workers()

    def _predictions(self) -> Iterator[Metric]:
        counted = self._view.predictions
        for name, text, value in (
            ("sequences", "Sequences that began to run on a worker.", counted.sequences),
            ("predicted_cached_tokens", "Prompt tokens that workers were expected to have cached.",
             counted.predicted_tokens),
            ("cached_tokens", "Prompt tokens that workers had cached.", counted.cached_tokens),
            ("missed_cached_tokens", "Prompt tokens expected to be cached that were not.", counted.missed_tokens),
            ("unexpected_cached_tokens", "Prompt tokens that were cached and not expected to be.",
             counted.unexpected_tokens),
        ):  # fmt: skip
            yield CounterMetricFamily(f"quire_router_{name}", text, value)

    def _workers(self) -> Iterator[Metric]:
        labels = ["worker"]
        ready = GaugeMetricFamily("quire_router_worker_ready", "1: the worker takes sequences.", labels=labels)
        running = GaugeMetricFamily("quire_router_worker_running", "Sequences that the worker has.", labels=labels)
        backlog = GaugeMetricFamily(
            "quire_router_worker_backlog_tokens", "Prompt tokens that the worker has yet to compute.", labels=labels
        )
        rate = GaugeMetricFamily(
            "quire_router_worker_prefill_tokens_per_second", "How fast the worker computes prompts.", labels=labels
        )
        for link in tuple(self._fleet.links):
            ready.add_metric([link.address], link.ready)
            running.add_metric([link.address], link.slots.running)
            worker = self._view.view(link)
            if worker is not None:
                backlog.add_metric([link.address], worker.backlog)
                rate.add_metric([link.address], worker.prefill_rate)
        yield from (ready, running, backlog, rate)


def serve_metrics(collector: RouterCollector, host: str, port: int) -> Callable[[], None]:
    """Answers GET /metrics on a thread. Raises OSError when the port cannot be used.

    Returns:
        What ends it.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    server, thread = start_http_server(port, host, registry)

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    return stop

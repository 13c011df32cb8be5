"""``python -m router``: one router process, from its flags to its exit status."""

import asyncio
import logging
import os
import signal
import sys

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from protos import inference_pb2, inference_pb2_grpc, registry_pb2_grpc
from protos.channel import add_port, make_server
from protos.logs import log_to_stderr
from protos.tracing import Tracing, TracingError, tracing_to
from router.access import KeyCheck
from router.admission import WaitingQueue
from router.config import PROG, ConfigError, RouterConfig, parse_args
from router.discovery import Discovery, RegistryServicer
from router.events import RouterEvents
from router.fleet import Fleet
from router.fleet_view import FleetView
from router.load_report import LoadReporter
from router.message_check import MessageCheck
from router.metrics import RouterCollector
from router.prompt_encoder import PromptEncoder
from router.recovery import Recovery
from router.routing.dispatcher import Dispatcher
from router.routing.fair_queue import FairQueue
from router.routing.policies import POLICIES
from router.routing.prefix_index import PrefixIndex
from router.routing.tenant_counters import TenantCounters
from router.scheduler import Scheduler
from router.server import InferenceServicer
from router.tokenizer import Tokenizer
from router.tokenizer_loading import load_tokenizer

logger = logging.getLogger("router")

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Seconds for the last statuses to reach their clients.
_LAST_WORDS_S = 1.0


def main(argv: list[str] | None = None) -> int:
    """Runs a router until a signal. Returns the process's exit status."""
    try:
        config = parse_args(argv)
    except ConfigError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    log_to_stderr(config.log_level, "router", config.log_format)
    return uvloop.run(serve(config))


async def serve(config: RouterConfig) -> int:
    """Loads the tokenizer and serves until SIGTERM or SIGINT.

    Returns:
        0 after a clean stop, 1 when the port or the model's files cannot be used; then a line in the log says why.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop)
    server = make_front(config)
    try:
        port = add_port(server, f"{config.host}:{config.port}", config.tls)
    except RuntimeError:
        logger.error(
            "cannot listen on %s:%d: the port is in use or the address is not this machine's", config.host, config.port
        )
        return 1
    tokenizer = await _load(config, stop)
    if tokenizer is None:
        return 1
    events = RouterEvents()
    try:
        tracing = tracing_to(config.otlp_traces_endpoint, "quire-router", events.spans_dropped.inc)
    except TracingError as error:
        logger.error("%s", error)
        return 1
    router = Router(config, tokenizer, server, events, tracing)
    stop_metrics = None
    if config.metrics_port is not None:
        try:
            stop_metrics = router.collector.serve(config.host, config.metrics_port)
        except OSError as error:
            logger.error("cannot listen on %s:%d for metrics: %s", config.host, config.metrics_port, error.strerror)
            return 1
    await router.start()
    logger.info("listening on %s:%d, model %s", config.host, port, ", ".join(config.model_names))
    await stop.wait()
    logger.info("shutting down")
    await router.stop(config.shutdown_timeout)
    await tracing.close()
    if stop_metrics is not None:
        stop_metrics()
    return 0


def make_front(config: RouterConfig) -> grpc.aio.Server:
    """The server that clients call, without services and port; it asks for keys where there are some."""
    if config.api_keys or config.own_key is not None:
        return make_server(config.tls, KeyCheck(config.api_keys, config.own_key), MessageCheck())
    return make_server(config.tls, MessageCheck())


class Router:
    """The parts of one router, put together around a gRPC server that is not started yet.

    Args:
        events: are counted.
        tracing: records requests.

    Attributes:
        collector: what it measures.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        server: grpc.aio.Server,
        events: RouterEvents | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        events = events or RouterEvents()
        self._server = server
        self._readiness = asyncio.Event()
        self._fleet = Fleet(tokenizer.model_vocab_size, config.worker_timeout, config.worker_tls)
        self._discovery = Discovery(config.worker_urls, self._fleet.set_addresses)
        index, counters = PrefixIndex(), TenantCounters()
        order = FairQueue(counters)
        dispatcher = Dispatcher(index, order, POLICIES[config.policy]())
        view = FleetView(index, dispatcher, counters, events)
        queue = WaitingQueue(order, dispatcher, config.max_num_queued_reqs, config.max_num_queued_tokens)
        reporter = LoadReporter(self._fleet, view, queue)
        self.collector = RouterCollector(reporter, events)
        self._scheduler = Scheduler(
            self._fleet, view, queue, dispatcher, config.max_queue_wait, events, self._readiness.set
        )
        self._recovery = Recovery(
            config.max_attempts, self._scheduler.put_back, self._scheduler.capacity_changed, events
        )
        self._encoder = PromptEncoder(tokenizer, queue, config.tokenizer_threads)
        self._inference = InferenceServicer(
            config.model_names, tokenizer, self._encoder, self._fleet, self._scheduler, self._recovery,
            reporter, self.collector, events, config.max_unsent_bytes, tracing or Tracing(),
        )  # fmt: skip
        self._health = health_aio.HealthServicer()
        inference_pb2_grpc.add_InferenceServicer_to_server(self._inference, server)
        self._registry = RegistryServicer(self._fleet.set_addresses)
        if config.enable_worker_registration:
            registry_pb2_grpc.add_RegistryServicer_to_server(self._registry, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
        self._health_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answers calls from here on, and connects to the workers."""
        await self._health.set("", _SERVING)
        await self._health.set(SERVICE, _NOT_SERVING)
        await self._server.start()
        self._health_task = asyncio.create_task(self._tell_readiness(), name="health")
        self._fleet.start(self._scheduler, self._recovery)
        self._discovery.start()

    async def stop(self, grace: float) -> None:
        """Gives running requests ``grace`` seconds, then ends everything."""
        if self._health_task is not None:
            self._health_task.cancel()
        await self._health.enter_graceful_shutdown()
        await self._inference.drain(grace)
        await self._server.stop(_LAST_WORDS_S)
        await self._discovery.stop()
        self._registry.close()
        await self._fleet.stop()
        self._encoder.close()

    async def _tell_readiness(self) -> None:
        """The health service's answer follows the workers."""
        while True:
            await self._readiness.wait()
            self._readiness.clear()
            await self._health.set(SERVICE, _SERVING if self._fleet.ready_count else _NOT_SERVING)


async def _load(config: RouterConfig, stop: asyncio.Event) -> Tokenizer | None:
    """The tokenizer, or None when it cannot be had; then the reason was logged in one line."""
    loading = asyncio.create_task(
        asyncio.to_thread(load_tokenizer, config.tokenizer or config.model, config.chat_template)
    )
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        os._exit(0)  # a thread that loads cannot be interrupted, and nothing was promised to anyone yet
    stopping.cancel()
    try:
        return loading.result()
    except ConfigError as error:
        logger.error("%s", error)
        return None


def _on_signal(stop: asyncio.Event) -> None:
    """The first signal asks for a clean stop, the second ends the process."""
    if stop.is_set():
        os._exit(130)
    stop.set()


if __name__ == "__main__":
    sys.exit(main())

"""``python -m worker``: one worker process, from its flags to its exit status."""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from protos import worker_pb2, worker_pb2_grpc
from protos.channel import add_port, make_server
from protos.logs import log_to_stderr
from protos.tracing import TracingError, tracing_to
from worker.config import PROG, ConfigError, WorkerConfig, parse_args
from worker.grammar import GrammarCompiler
from worker.phases import StartPhases
from worker.registration import Registration
from worker.server import WorkerServicer
from worker.vocabulary import Vocabulary, VocabularyError

if TYPE_CHECKING:
    from worker.engine import Engine, EngineLimits

    Built = tuple[Engine, EngineLimits, Vocabulary | VocabularyError]

logger = logging.getLogger("worker")

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def main(argv: list[str] | None = None) -> int:
    """Runs a worker until a signal or a failure. Returns the process's exit status."""
    try:
        config = parse_args(argv)
    except ConfigError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    log_to_stderr(config.log_level, "worker", config.log_format)
    return uvloop.run(serve(config))


async def serve(config: WorkerConfig, load: "Callable[[WorkerConfig], Built | None] | None" = None) -> int:
    """Binds the port, loads the model, and serves until SIGTERM, SIGINT or an engine failure.

    Args:
        config: the settings.
        load: builds the engine, on a thread; by default from ``config``. None: it cannot, and has said why.

    Returns:
        0 after a clean stop, 1 when the model could not be served or the engine failed.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop)

    phases = StartPhases()
    # The port is bound and answers health checks before the model is loaded: a probe can tell "starting" from "gone".
    server = make_server(config.tls)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    address = f"{config.host}:{config.port}"
    try:
        port = add_port(server, address, config.tls)
    except RuntimeError:
        logger.error("cannot listen on %s: the port is in use or the address is not this machine's", address)
        return 1
    try:
        tracing = tracing_to(config.otlp_traces_endpoint, "quire-worker")
    except TracingError as error:
        logger.error("%s", error)
        return 1
    servicer = WorkerServicer(config.identity(port), tracing)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    reflection.enable_server_reflection((SERVICE, HEALTH_SERVICE), server)
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    await health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    logger.info("listening on %s:%d, loading the model", config.host, port)

    loading = asyncio.create_task(asyncio.to_thread(load or partial(_load, phases), config))
    await _first_of(loading, stop.wait())
    if not loading.done():
        os._exit(0)  # a thread that loads weights cannot be interrupted, and nothing was promised to anyone yet
    built = loading.result()
    if built is None:
        await server.stop(0)
        return 1

    # What start-up made lives as long as the process: a collection that walks through it would delay a step.
    gc.collect()
    gc.freeze()
    engine, limits, vocabulary = built
    servicer.start(engine, limits, GrammarCompiler(vocabulary, limits.vocab_size), phases.seconds)
    await health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    logger.info("ready on %s:%d", config.host, port)
    registration = _registration(config, port)
    if registration is not None:
        registration.start()
    await _first_of(stop.wait(), servicer.failed.wait())
    await health.enter_graceful_shutdown()
    failed = servicer.failed.is_set()
    logger.info("engine failed, leaving" if failed else "shutting down")
    if registration is not None:
        await registration.leave()
    await servicer.drain(1.0 if failed else config.shutdown_timeout)
    await server.stop(1.0)
    await tracing.close()
    if failed:
        # A thread that waits in a collective operation for a rank that is gone would hold up the interpreter's end.
        logging.shutdown()
        os._exit(1)
    return 0


def _registration(config: WorkerConfig, port: int) -> Registration | None:
    """What announces this worker, if somebody is to be told."""
    if not config.register:
        return None
    host, named_port = config.advertised
    return Registration(config.register, host, named_port or port, config.router_tls, config.router_api_key)


def _load(phases: StartPhases, config: WorkerConfig) -> "Built | None":
    """The engine and the vocabulary, or None when it cannot be built; then the reason was logged in one line."""
    with phases.phase("imports"):
        # Imports torch, which takes seconds: not before the port answers.
        from worker.loader import open_checkpoint
        from worker.loader.checkpoint import CheckpointError
        from worker.model_config import UnsupportedModel
        from worker.parallel.ranks import RankFailed
        from worker.startup import build_engine

    try:
        with phases.phase("configuration"):
            checkpoint = open_checkpoint(config.model)
        engine, limits = build_engine(config, checkpoint, phases)
        try:
            with phases.phase("vocabulary"):
                return engine, limits, checkpoint.vocabulary()
        except VocabularyError as error:
            logger.warning("no structured output: %s", error)
            return engine, limits, error
    except (ConfigError, CheckpointError, UnsupportedModel, RankFailed) as error:
        logger.error("%s", error)
    except MemoryError:
        logger.error("not enough memory for the model; a smaller --dtype or --kv-cache-memory-bytes needs less")
    return None


async def _first_of(*waits: "Coroutine[Any, Any, Any] | asyncio.Task[Any]") -> None:
    """Waits until one is done, and cancels those that are not, tasks given as such excepted."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, wait in zip(tasks, waits, strict=True):
        if task is not wait:
            task.cancel()


def _on_signal(stop: asyncio.Event) -> None:
    """The first signal asks for a clean stop, the second ends the process."""
    if stop.is_set():
        os._exit(130)
    stop.set()


if __name__ == "__main__":
    sys.exit(main())

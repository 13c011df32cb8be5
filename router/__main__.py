"""``python -m router``: the router process, from its flags to its exit status."""

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

from protos import inference_pb2, inference_pb2_grpc
from protos.channel import SERVER_OPTIONS
from router.config import PROG, ConfigError, RouterConfig, parse_args
from router.fleet import Fleet
from router.server import InferenceServicer
from router.tokenizer import TokenizerError, load_tokenizer

logger = logging.getLogger("router")

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def main(argv: list[str] | None = None) -> int:
    """Runs the router until a signal. Returns the process's exit status."""
    try:
        config = parse_args(argv)
    except ConfigError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s router %(message)s", stream=sys.stderr
    )
    return uvloop.run(serve(config))


async def serve(config: RouterConfig) -> int:
    """Loads the tokenizer, binds the port, and serves until SIGTERM or SIGINT.

    Returns:
        0 after a clean stop, 1 when the tokenizer or the port cannot be had.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop)
    try:
        tokenizer = load_tokenizer(config.tokenizer or config.model, config.chat_template)
    except TokenizerError as error:
        logger.error("%s", error)
        return 1

    fleet = Fleet(config.worker_urls, tokenizer.vocab_size, config.worker_timeout)
    servicer = InferenceServicer(config, tokenizer, fleet)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, HEALTH_SERVICE), server)
    address = f"{config.host}:{config.port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        logger.error("cannot listen on %s: the port is in use or the address is not this machine's", address)
        return 1
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    await health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    logger.info("listening on %s:%d for %s", config.host, port, ", ".join(config.served_model_name))

    changed = asyncio.Event()

    def on_change() -> None:
        servicer.bind()
        changed.set()

    fleet.on_change = on_change
    tasks = [
        asyncio.create_task(fleet.run(), name="fleet"),
        asyncio.create_task(_follow_readiness(fleet, health, changed), name="readiness"),
    ]
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
    failed = stopping not in done
    for task in done & set(tasks):
        logger.error("the router's %s ended", task.get_name(), exc_info=task.exception())
    logger.info("shutting down")
    tasks[1].cancel()
    await health.enter_graceful_shutdown()
    await servicer.drain(0.0 if failed else config.shutdown_timeout)
    await server.stop(1.0)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return 1 if failed else 0


async def _follow_readiness(fleet: Fleet, health: health_aio.HealthServicer, changed: asyncio.Event) -> None:
    """Says SERVING while at least one worker is ready."""
    while True:
        status = health_pb2.HealthCheckResponse.SERVING if fleet.ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await health.set(SERVICE, status)
        changed.clear()
        await changed.wait()


def _on_signal(stop: asyncio.Event) -> None:
    """The first signal asks for a clean stop, the second ends the process."""
    if stop.is_set():
        os._exit(130)
    stop.set()


if __name__ == "__main__":
    sys.exit(main())

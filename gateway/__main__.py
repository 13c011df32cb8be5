"""``python -m gateway``: one gateway process, from its flags to its exit status."""

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from gateway.app import create_app
from gateway.config import PROG, ConfigError, GatewayConfig, parse_args
from gateway.connection import connection_type
from gateway.listener import listen
from gateway.processes import run_processes
from protos.logs import log_to_stderr
from protos.tls import ServerTls
from protos.tracing import TracingError, tracing_to

logger = logging.getLogger("gateway")

# Seconds that an idle connection stays open: longer than clients and load balancers keep theirs, so that none of them
# sends a request into a connection that is just being closed.
_KEEP_ALIVE = 75
# Seconds after --shutdown-timeout for the last error events to reach their clients.
_LAST_WORDS = 5


def main(argv: list[str] | None = None) -> int:
    """Runs a gateway until a signal. Returns the process's exit status."""
    try:
        config = parse_args(argv)
        app = create_app(config)
        _log(config)
        if config.processes > 1:
            return run_processes(config, sys.argv[1:] if argv is None else argv)
        listener = listen(config.host, config.port)
    except ConfigError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    return uvloop.run(serve(app, config, listener))


def run_owned(argv: Sequence[str], listener: socket.socket) -> int:
    """Runs one of several gateways, which ends at once when its standard input does. Returns the exit status."""
    config = parse_args(list(argv))
    _log(config)
    return uvloop.run(serve(create_app(config), config, listener, owner=sys.stdin.fileno()))


def _log(config: GatewayConfig) -> None:
    log_to_stderr(config.log_level, "gateway", config.log_format)
    # uvicorn's notes on starting and stopping say nothing that ours do not, and its warnings are of what is not HTTP:
    # any client could fill a disk with them.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


async def serve(app: FastAPI, config: GatewayConfig, listener: socket.socket, owner: int | None = None) -> int:
    """Serves on a bound socket until SIGTERM or SIGINT, and closes it.

    Running requests get ``shutdown_timeout`` seconds; then their clients get an error. Returns 0, or 1 when traces are
    asked for and cannot be made. ``owner`` is a descriptor at whose end the process ends at once.
    """
    try:
        dropped = app.state.metrics.spans_dropped
        app.state.tracing = tracing_to(config.otlp_traces_endpoint, "quire-gateway", dropped.inc)
    except TracingError as error:
        logger.error("%s", error)
        return 1
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE,
            http=connection_type(config.limits.header_timeout),
            # The app refuses headers over the limit with an error object; the parser ends what is far over it.
            h11_max_incomplete_event_size=2 * config.limits.max_header_bytes,
            timeout_graceful_shutdown=int(config.shutdown_timeout) + _LAST_WORDS,
            **_tls(config.tls),
        )
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, loop, server, app, config.shutdown_timeout)
    if owner is not None:
        loop.add_reader(owner, os._exit, 1)
    host, port = listener.getsockname()[:2]
    logger.info("listening on %s:%d, router %s", host, port, config.router)
    await server.serve(sockets=[listener])
    await app.state.tracing.close()
    logger.info("stopped")
    return 0


def _tls(tls: ServerTls | None) -> dict[str, Any]:
    """uvicorn's settings."""
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_ca_certs": None if tls.ca_certs is None else str(tls.ca_certs),
        "ssl_cert_reqs": ssl.CERT_NONE if tls.ca_certs is None else ssl.CERT_REQUIRED,
    }


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are ours: uvicorn would raise them again at the end, and the exit status would not be 0."""
        yield


def _on_signal(loop: asyncio.AbstractEventLoop, server: uvicorn.Server, app: FastAPI, timeout: float) -> None:
    """The first signal asks for a clean stop, the second ends the process."""
    if server.should_exit:
        os._exit(130)
    logger.info("shutting down, running requests have %.0f s", timeout)
    server.should_exit = True
    if server.started:
        app.state.upstream.drain()
        loop.call_later(timeout, app.state.upstream.stop_running)


if __name__ == "__main__":
    sys.exit(main())

"""Several gateway processes on one port: the owner that starts, watches and ends them, and what one of them runs.

    python -m gateway.processes FD ARGS

Each listens on a socket of its own, bound with SO_REUSEPORT, so that the kernel spreads connections over them; the
owner binds all of them, which settles the port, and hands them down. Metrics are summed over all processes, through
files that Prometheus' library maps into memory. What else a process counts, limits of keys above all, it counts for
itself.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gateway.config import GatewayConfig
from gateway.listener import listen

logger = logging.getLogger("gateway")

# Where processes keep their figures. The library looks for it when it is imported.
_METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_INTERRUPTED = 130


def run_processes(config: GatewayConfig, argv: Sequence[str]) -> int:
    """Runs ``config.processes`` gateways with these arguments until a signal. Returns the exit status.

    A process that ends by itself ends the others, and the status is 1.

    Raises:
        ConfigError: the address cannot be had.
    """
    # Another server that shares the port would be let in beside ours; this bind is refused while there is one.
    with listen(config.host, config.port) as probe:
        port = probe.getsockname()[1]
    listeners = [listen(config.host, port, shared=True) for _ in range(config.processes)]
    with tempfile.TemporaryDirectory(prefix="quire-gateway-") as folder:
        return asyncio.run(_own(listeners, argv, Path(folder)))


async def _own(listeners: Sequence[socket.socket], argv: Sequence[str], metrics_folder: Path) -> int:
    stop = asyncio.Event()
    children: list[asyncio.subprocess.Process] = []

    def on_signal() -> None:
        if stop.is_set():
            for child in children:
                if child.returncode is None:
                    child.kill()
            os._exit(_INTERRUPTED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    for listener in listeners:
        children.append(await _start(listener, argv, metrics_folder))
        # Open here, it would go on taking connections when its process no longer does.
        listener.close()
    logger.info("%d processes share one port", len(children))
    ends = [asyncio.create_task(child.wait()) for child in children]
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([*ends, stopped], return_when=asyncio.FIRST_COMPLETED)
    asked = stop.is_set()
    stopped.cancel()
    for child in children:
        if child.returncode is None:
            child.terminate()
        else:
            logger.error("process %d ended with status %d; ending the others", child.pid, child.returncode)
    statuses = await asyncio.gather(*ends)
    return 0 if asked and not any(statuses) else 1


async def _start(listener: socket.socket, argv: Sequence[str], metrics_folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.processes", str(listener.fileno()), *argv),
        # Nothing is written to it: that it ends tells the process that its owner is gone.
        stdin=asyncio.subprocess.PIPE,
        pass_fds=(listener.fileno(),),
        env={**os.environ, _METRICS_FOLDER: str(metrics_folder)},
        process_group=0,  # Ctrl-C in the terminal is for the owner alone
    )


def main(argv: Sequence[str]) -> int:
    """One of the processes: the descriptor of its socket, and the gateway's arguments."""
    # Only here: what it imports looks for _METRICS_FOLDER, and the owner has no use for it.
    from gateway.__main__ import run_owned

    descriptor, *arguments = argv
    return run_owned(arguments, socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Where workers are: addresses that were given, names that are looked up again and again, and workers that register.

Each source says which addresses it knows now; the fleet has a link to every address that some source knows.
"""

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from urllib.parse import unquote

from grpc.aio import ServicerContext

from protos import registry_pb2, registry_pb2_grpc
from router.config import DNS_SCHEME
from router.errors import InvalidArgument, answers_errors

logger = logging.getLogger(__name__)

LOOKUP_INTERVAL_S = 5.0
# A worker renews its registration so often; after three times that long it has stopped doing so.
RENEW_AFTER_S = 5.0
LEASE_S = 3 * RENEW_AFTER_S
# Whoever registers more is not a fleet.
MAX_REGISTERED = 1024

# As long as a name in DNS may be; an IPv6 address may have brackets and a zone.
MAX_HOST_CHARS = 253
_HOST = re.compile(rf"[A-Za-z0-9._:%\[\]-]{{1,{MAX_HOST_CHARS}}}")

# Called with a source's name and all addresses that it knows now.
Report = Callable[[str, Collection[str]], None]


class Discovery:
    """All sources of one router.

    Args:
        targets: HOST:PORT, or dns:///NAME:PORT for all addresses of a name.
        report: is told what each source knows, whenever that changes.
    """

    def __init__(self, targets: Sequence[str], report: Report) -> None:
        self._names = [target for target in targets if target.startswith(DNS_SCHEME)]
        self._fixed = [target for target in targets if not target.startswith(DNS_SCHEME)]
        self._report = report
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Reports what is known, and looks up names until ``stop``."""
        self._report("given", self._fixed)
        self._tasks = [asyncio.create_task(self._follow(name), name=f"look up {name}") for name in self._names]

    async def stop(self) -> None:
        """Looks up nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, name: str) -> None:
        known: list[str] | None = None
        fault = ""
        while True:
            try:
                addresses = await lookup(name)
            except OSError as error:
                # What was known is kept: names go away with their server too, and workers do not.
                if str(error) != fault:
                    logger.warning("%s cannot be looked up: %s", name, error)
                fault = str(error)
            else:
                fault = ""
                if addresses != known:
                    known = addresses
                    logger.info("%s is %s", name, ", ".join(addresses))
                    self._report(name, addresses)
            await asyncio.sleep(LOOKUP_INTERVAL_S)


async def lookup(name: str) -> list[str]:
    """All addresses of dns:///NAME:PORT, sorted, as HOST:PORT. Raises OSError when there is none."""
    host, _, port = name.removeprefix(DNS_SCHEME).rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return sorted({join(str(address[0]), int(address[1])) for *_, address in found})


def join(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class RegistryServicer(registry_pb2_grpc.RegistryServicer):
    """Workers that say themselves where they are. Each stays known until its lease ends or it says that it leaves."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._leases: dict[str, asyncio.TimerHandle] = {}

    @answers_errors
    async def Register(
        self, message: registry_pb2.RegisterRequest, context: "ServicerContext[object, object]"
    ) -> registry_pb2.RegisterResponse:
        """Begins, renews or ends a lease."""
        if not 0 < message.port <= 65535:
            raise InvalidArgument("port", f"port is {message.port}; it must be 1 to 65535")
        host = message.host or peer_host(context.peer())
        if not host:
            raise InvalidArgument("host", f"host is empty and the call's peer {context.peer()} has no address; name it")
        if not _HOST.fullmatch(host):
            raise InvalidArgument(
                "host",
                f"host has {len(host)} characters; it must be a name or address of 1 to {MAX_HOST_CHARS}, in ASCII",
            )
        self._renew(join(host.strip("[]"), message.port), leaving=message.leaving)
        return registry_pb2.RegisterResponse(renew_after_ms=int(RENEW_AFTER_S * 1000))

    def close(self) -> None:
        """Forgets all leases, telling nobody."""
        for lease in self._leases.values():
            lease.cancel()
        self._leases.clear()

    def _renew(self, address: str, *, leaving: bool) -> None:
        known = self._leases.pop(address, None)
        if known is not None:
            known.cancel()
        changed = leaving == (known is not None)
        if changed:
            logger.info("worker at %s %s", address, "leaves" if leaving else "registered")
        if not leaving:
            if len(self._leases) >= MAX_REGISTERED:
                raise InvalidArgument("port", f"{MAX_REGISTERED} workers are registered; that many is the most")
            self._leases[address] = asyncio.get_running_loop().call_later(LEASE_S, self._expire, address)
        if changed:
            self._report("registered", list(self._leases))

    def _expire(self, address: str) -> None:
        with suppress(KeyError):
            del self._leases[address]
            logger.info("worker at %s has not renewed its registration for %g s", address, LEASE_S)
            self._report("registered", list(self._leases))


def peer_host(peer: str) -> str:
    """The host in what gRPC calls a peer, say ``ipv4:10.0.0.7:4242`` or ``ipv6:%5B::1%5D:4242``; empty: it has none."""
    family, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if family in ("ipv4", "ipv6") else ""

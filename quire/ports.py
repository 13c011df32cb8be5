"""Finds out, before anything is started, whether the ports of a server are free."""

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass


class PortError(Exception):
    """An address cannot be listened on; the message names it and the flag to change."""


@dataclass(frozen=True)
class PortWish:
    """An address to listen on. Port 0 stands for any free one; ``flag`` is what a person would change."""

    flag: str
    host: str
    port: int


def choose_ports(wishes: Sequence[PortWish]) -> list[int]:
    """The ports to use, in order, all different and all free a moment ago. Raises PortError when one is not.

    Another process may still take one before its owner does; the owner then fails by itself, loudly.
    """
    chosen = []
    with ExitStack() as held:  # all at once, so that two wishes for any port get two ports
        for wish in wishes:
            chosen.append(_bind(wish, held))
    return chosen


def _bind(wish: PortWish, held: ExitStack) -> int:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            wish.host, wish.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise PortError(f"{wish.host} is no address of this machine ({error.strerror}); change --host") from error
    bound = held.enter_context(socket.socket(family, kind, protocol))
    # As servers do: connections of an earlier run that linger in TIME_WAIT do not count.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(1)  # with SO_REUSEADDR, it may be only this call that fails
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise PortError(f"{wish.host} is no address of this machine; change --host") from error
        raise PortError(
            f"cannot listen on port {wish.port} of {wish.host} ({error.strerror}): stop what uses it "
            f"(`ss -ltnp 'sport = :{wish.port}'` names it), or choose another with {wish.flag}"
        ) from error
    return int(bound.getsockname()[1])


def local_host(host: str) -> str:
    """The address at which this machine reaches a server bound to ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def join(host: str, port: int) -> str:
    """``host:port``, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

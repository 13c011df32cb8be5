"""Binds the port that the gateway serves on."""

import socket

from gateway.config import ConfigError


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError when the address cannot be had.

    Where all of them are ``shared``, several sockets listen on one port, and the kernel spreads connections over them.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address, family=family, backlog=2048, reuse_port=shared)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); "
            "choose another --port, or as --host an address of this machine"
        ) from None
    # Accepted connections inherit it. asyncio sets it only on sockets made with IPPROTO_TCP, which these are not,
    # and without it each reply waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener

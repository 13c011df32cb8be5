"""The listening socket."""

import socket

import pytest

from gateway.config import ConfigError
from gateway.listener import listen


def test_accepted_connections_send_small_writes_at_once():
    """Without TCP_NODELAY every reply in two writes costs 40 ms."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_names_are_resolved():
    with listen("localhost", 0) as listener:
        assert listener.getsockname()[1] > 0


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_cannot_be_had_is_named(host):
    with pytest.raises(ConfigError, match=host):
        listen(host, 0)

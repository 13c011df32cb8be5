"""Messages between the leader and one rank, over a socket pair: a length and so many bytes."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("=I")


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of a connected stream socket, which it owns. One thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: bytes, timeout: float | None = None) -> None:
        """Sends a message.

        Args:
            message: at most 4 GiB.
            timeout: seconds until the other end must have taken it in; None waits as long as it takes.

        Raises:
            ChannelClosed: the other end is gone.
            TimeoutError: it does not read.
        """
        self._connection.settimeout(timeout)
        try:
            self._connection.sendall(_LENGTH.pack(len(message)) + message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the other end of the channel is gone") from error

    def receive(self, timeout: float | None = None) -> bytes:
        """The next message.

        Args:
            timeout: seconds to wait for more bytes; None waits as long as it takes.

        Raises:
            ChannelClosed: the other end is gone.
            TimeoutError: nothing came.
        """
        self._connection.settimeout(timeout)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def send_values(self, **values: Any) -> None:
        """Sends a message of named values that JSON can hold. Raises as ``send`` does."""
        self.send(json.dumps(values).encode())

    def receive_values(self, timeout: float | None = None) -> dict[str, Any]:
        """A message that was sent by ``send_values``. Raises as ``receive`` does."""
        values: dict[str, Any] = json.loads(self.receive(timeout))
        return values

    def close(self) -> None:
        """The other end finds the channel closed."""
        self._connection.close()

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                done = self._connection.recv_into(view)
            except ConnectionResetError:
                done = 0
            if not done:
                raise ChannelClosed("the other end of the channel is gone")
            view = view[done:]
        return bytes(data)

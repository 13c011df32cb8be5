"""As much of an HTTP/1.1 client as a benchmark needs: it must cost less than what it measures.

Connections are used again. Bodies may be chunked at any place, as proxies cut them where they like.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

_READ_BYTES = 1 << 16


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Reply:
    """What a server answers.

    Attributes:
        status: the HTTP status.
        headers: names in lower case.
        complete: all of the body has been read.
    """

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status, self.headers = status, headers
        self.complete = False
        self._reader = reader

    @property
    def keeps_open(self) -> bool:
        """Whether another request may follow on the same connection."""
        bounded = "content-length" in self.headers or self._chunked
        return self.complete and bounded and self.headers.get("connection", "").lower() != "close"

    @property
    def _chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ConnectionError when it breaks off, ValueError when it is not HTTP."""
        if self._chunked:
            while size := int((await _line(self._reader)).split(b";")[0], 16):
                async for piece in self._exactly(size):
                    yield piece
                await _line(self._reader)
            while await _line(self._reader):
                pass  # trailers
        elif "content-length" in self.headers:
            async for piece in self._exactly(int(self.headers["content-length"])):
                yield piece
        else:
            while piece := await self._reader.read(_READ_BYTES):
                yield piece
        self.complete = True

    async def _exactly(self, size: int) -> AsyncIterator[bytes]:
        while size:
            piece = await self._reader.read(min(size, _READ_BYTES))
            if not piece:
                raise ConnectionError("the server closed the connection within its answer")
            size -= len(piece)
            yield piece

    async def lines(self) -> AsyncIterator[bytes]:
        """The body's lines without their ends. Raises as ``pieces`` does."""
        rest = b""
        async for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def read(self) -> bytes:
        """The whole body. Raises as ``pieces`` does."""
        return b"".join([piece async for piece in self.pieces()])


class HttpConnections:
    """Connections to one server.

    Args:
        url: http:// or https://, with a path that goes before that of each request.
        trusted: whose certificates are trusted, for https.
        headers: of each request.

    Raises:
        ValueError: it is no such URL.
    """

    def __init__(self, url: str, trusted: ssl.SSLContext | None = None, headers: Mapping[str, str] = {}) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url} is no address of an OpenAI API; wanted one such as http://127.0.0.1:8000/v1")
        self._tls = (trusted or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": parts.netloc, **headers}.items())
        self._idle: list[_Connection] = []

    async def close(self) -> None:
        """Closes what is not in use; nothing is sent after this."""
        for connection in self._idle:
            connection.writer.close()
            with suppress(OSError):
                await connection.writer.wait_closed()
        self._idle.clear()
        await asyncio.sleep(0)  # those closed before get their turn to let go of their sockets

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Reply]:
        """Sends a request; its answer is read within the context.

        Raises:
            OSError: the server cannot be reached, or closed the connection.
            ValueError: what it answers is not HTTP.
        """
        kind = "Content-Type: application/json\r\n" if body else ""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{kind}Content-Length: {len(body)}\r\n\r\n"
        connection, reply = await self._send(head.encode() + body)
        try:
            yield reply
        finally:
            if reply.keeps_open:
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def _send(self, message: bytes) -> tuple[_Connection, Reply]:
        while True:
            used = bool(self._idle)
            connection = self._idle.pop() if used else await self._connect()
            try:
                connection.writer.write(message)
                return connection, await _reply(connection.reader)
            except ConnectionError:
                connection.writer.close()
                if not used:  # a server may close what is idle at any time, and then has not seen the request
                    raise
            except BaseException:
                connection.writer.close()
                raise

    async def _connect(self) -> _Connection:
        try:
            return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._tls))
        except OSError as error:
            raise OSError(f"cannot connect to {self._host}:{self._port}: {error}") from error


async def _reply(reader: asyncio.StreamReader) -> Reply:
    status = await _line(reader)
    parts = status.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise ValueError(f"the server's answer is not HTTP/1.1: {status[:80]!r}")
    headers = {}
    while line := await _line(reader):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return Reply(int(parts[1]), headers, reader)


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the server closed the connection")
    return line.rstrip(b"\r\n")

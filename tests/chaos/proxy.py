"""A TCP proxy on 127.0.0.1 that delays what passes and cuts connections."""

import asyncio
from contextlib import suppress

_CHUNK = 65536


class Proxy:
    """Stands before a port. Runs from ``start`` to ``close``.

    Attributes:
        port: where it listens.
        delay: seconds that each chunk is held back, in each direction.
    """

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.delay = 0.0
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Breaks all connections at once, what is under way with them."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Passes on, each chunk late by ``delay``, until one end closes; then the other one is closed too."""
        loop = asyncio.get_running_loop()
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

        async def send() -> None:
            while True:
                due, data = await held.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    return
                sink.write(data)
                await sink.drain()

        sending = asyncio.create_task(send())
        try:
            with suppress(OSError):
                while data := await source.read(_CHUNK):
                    await held.put((loop.time() + self.delay, data))
                await held.put((loop.time(), b""))
                await sending
        finally:
            sending.cancel()
            with suppress(OSError, asyncio.CancelledError):
                await sending
            self._writers.discard(sink)
            sink.transport.abort()

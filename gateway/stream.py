"""Sends a generation as server-sent events, and notices clients that go away."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError, ClientGone, internal
from gateway.generation import Ending, Generation, Piece
from gateway.logprobs import LogprobShaper
from gateway.output_reader import Delta, OutputReader
from gateway.replies import CompletionTokensDetails, PromptTokensDetails, UsageReply

logger = logging.getLogger("gateway")

# Seconds of silence after which a comment is sent, so that proxies do not take the connection for dead.
KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": keep-alive\n\n"


def usage_of(generation: Generation) -> UsageReply:
    """The tokens of the whole request so far."""
    return UsageReply(
        prompt_tokens=generation.prompt_tokens,
        completion_tokens=generation.completion_tokens,
        total_tokens=generation.prompt_tokens + generation.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=generation.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=generation.reasoning_tokens),
    )


@asynccontextmanager
async def stopped_with_client(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """While inside, the generation is stopped with ClientGone as soon as the client has closed its connection."""
    watch = asyncio.create_task(_watch(receive, generation))
    try:
        yield
    finally:
        watch.cancel()


async def _watch(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.stop(ClientGone())


class EventWriter(Protocol):
    """Writes the events of one stream in some API's form; each method gives the bytes of whole events, or none."""

    def opening(self) -> bytes:
        """What comes before everything else."""

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        """New content of a choice."""

    def delta(self, index: int, delta: Delta, logprobs: dict[str, Any] | None = None) -> bytes:
        """Something new of a choice; an empty delta only has log-probabilities."""

    def finish(self, index: int, ending: Ending) -> bytes:
        """The end of a choice."""

    def end(self, usage: UsageReply) -> bytes:
        """The end of a stream all of whose choices have ended."""

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that broke."""


class EventStream(Response):
    """The response of a streamed request whose generation has been started; closes the generation."""

    def __init__(
        self,
        generation: Generation,
        pieces: AsyncIterator[Piece],
        writer: EventWriter,
        *,
        headers: Mapping[str, str],
        readers: Sequence[OutputReader],
        splits: bool,
        echoes: Sequence[str] = (),
        shaper: LogprobShaper | None = None,
    ) -> None:
        """Takes a started generation.

        Args:
            pieces: of it, to be sent.
            writer: of the events.
            headers: beside those that every stream has.
            readers: one for each choice.
            splits: whether messages are sent in the readers' parts; they only check the text otherwise.
            echoes: the texts that choices begin with.
            shaper: is there when log-probabilities are wanted.
        """
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._generation = generation
        self._pieces = pieces
        self._writer = writer
        self._readers = readers
        self._splits = splits
        self._echoes = echoes
        self._shaper = shaper
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events; raises ClientGone when the client leaves before the end."""
        beat: asyncio.Task[None] | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with stopped_with_client(receive, self._generation):
                await self._write(send, self._writer.opening())
                if self._shaper is None:  # else each comes with the log-probabilities of its tokens
                    for index, text in enumerate(self._echoes):
                        await self._write(send, self._writer.text(index, text))
                beat = asyncio.create_task(self._beat(send))
                await self._send_pieces(send)
            beat.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if beat is not None:
                beat.cancel()
            self._generation.close()

    async def _send_pieces(self, send: Send) -> None:
        writer = self._writer
        try:
            async for piece in self._pieces:
                reader = self._readers[piece.index]
                if piece.ending is not None:
                    await self._finish(send, piece.index, piece.ending)
                    continue
                logprobs = self._shaper.shape(piece.index, piece.tokens) if self._shaper else None
                if self._splits:
                    await self._write(send, self._parts(piece.index, reader.push(piece.text), logprobs))
                else:
                    reader.push(piece.text)
                    text = self._echoes[piece.index] if piece.of_prompt else piece.text
                    await self._write(send, writer.text(piece.index, text, logprobs))
                if reader.ended:
                    ending = Ending("content_filter", None)
                    self._generation.cut(piece.index, ending.reason)
                    await self._finish(send, piece.index, ending)
        except ClientGone:
            raise
        except Exception as error:
            # The status line is sent: all that is left is an event.
            answer = error if isinstance(error, ApiError) else internal("a stream broke")
            logger.info("stream %s ended with an error: %d %s", self._generation.id, answer.status, answer.message)
            # What else runs need not wait for a slow client to have read of it.
            self._generation.close()
            await self._write(send, writer.error(answer))
            return
        await self._write(send, writer.end(usage_of(self._generation)))

    async def _finish(self, send: Send, index: int, ending: Ending) -> None:
        """The last chunks of a choice."""
        deltas, ending = self._readers[index].finish(ending)
        last = [self._writer.delta(index, delta) for delta in deltas] if self._splits else []
        last.append(self._writer.finish(index, ending))
        await self._write(send, b"".join(last))

    def _parts(self, index: int, deltas: list[Delta], logprobs: dict[str, Any] | None) -> bytes:
        """Chunks of what a piece of text came to, which may be nothing yet; the first has the log-probabilities."""
        if not deltas and logprobs is None:
            return b""
        first, *others = deltas or [{}]
        pieces = [self._writer.delta(index, first, logprobs), *(self._writer.delta(index, delta) for delta in others)]
        return b"".join(pieces)

    async def _write(self, send: Send, data: bytes) -> None:
        self._last_write = asyncio.get_running_loop().time()
        if not data:
            return
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _beat(self, send: Send) -> None:
        """Breaks long silences."""
        loop = asyncio.get_running_loop()
        while True:
            wait = self._last_write + KEEP_ALIVE_S - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                await self._write(send, _KEEP_ALIVE)

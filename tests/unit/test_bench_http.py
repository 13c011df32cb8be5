"""The benchmark's HTTP client, against a socket that sends what a test says, in pieces as a test cuts them."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.bench.fronts import HttpFront, Sampling
from quire.bench.http_connections import HttpConnections
from quire.bench.records import Job, Record
from tests.doubles.certificates import Authority

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
EVENTS = [
    {"choices": [{"text": ""}]}, {"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]},
    {"choices": [], "usage": USAGE},
]  # fmt: skip
STREAM = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n"


def chunked(body: str, size: int) -> bytes:
    data = body.encode()
    pieces = [data[place : place + size] for place in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Server:
    """Sends its replies in turn, one a request; counts connections and keeps requests."""

    def __init__(self, *replies: bytes) -> None:
        self.replies = list(replies)
        self.connections = 0
        self.requests: list[bytes] = []
        self.closes_after_reply = False
        self.open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                reply = self.replies.pop(0)
                for place in range(0, len(reply), 7):  # wherever a network cuts it
                    writer.write(reply[place : place + 7])
                    await writer.drain()
                    await asyncio.sleep(0)
                if not self.replies or self.closes_after_reply:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
            await writer.wait_closed()
            self.open -= 1


@asynccontextmanager
async def running(server: Server, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    async with await asyncio.start_server(server, "127.0.0.1", 0, ssl=tls) as listening:
        yield f"http{'s' if tls else ''}://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        while server.open:
            await asyncio.sleep(0.001)


async def ask(url: str, times: int = 1, **options: Any) -> list[Record]:
    records = []
    async with HttpFront(url, "m", "completions", Sampling(), "key", **options) as front:
        for _ in range(times):
            record = Record(0.0)
            await front.run(Job("hello", 2), record)
            records.append(record)
    return records


@pytest.mark.parametrize("size", [1, 5, 40, 10_000])
async def test_a_stream_may_be_cut_anywhere(size: int) -> None:
    server = Server(OK + chunked(STREAM, size))
    async with running(server) as url:
        (record,) = await ask(url)
    assert (record.error, record.text, len(record.times)) == ("", "ab", 2)
    assert (record.prompt_tokens, record.tokens, record.cached_tokens) == (3, 2, 1)
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer key" in head
    assert json.loads(body)["stream_options"] == {"include_usage": True}


async def test_connections_are_used_again_and_replaced_when_they_were_closed() -> None:
    server = Server(*[OK + chunked(STREAM, 30)] * 3)
    async with running(server) as url:
        assert [record.error for record in await ask(url, 3)] == ["", "", ""]
    assert server.connections == 1
    server = Server(*[OK + chunked(STREAM, 30)] * 3)
    server.closes_after_reply = True
    async with running(server) as url:
        assert [record.error for record in await ask(url, 3)] == ["", "", ""]
    assert server.connections == 3


@pytest.mark.parametrize(
    ("reply", "kind", "detail"),
    [
        (b'HTTP/1.1 429 Busy\r\nContent-Length: 30\r\n\r\n{"error": {"message": "full"}}', "http_429", "full"),
        (b"HTTP/1.1 502 Bad\r\nConnection: close\r\n\r\n<html>", "http_502", "<html>"),
        (b"", "connection", "closed the connection"),
        (b"SSH-2.0-x\r\n", "protocol", "not HTTP/1.1"),
        (OK + chunked(STREAM, 30)[:150], "disconnected", "closed the connection"),
        (OK + chunked(STREAM.replace("data: [DONE]", ""), 30), "cut_off", "without its last event"),
        (OK + chunked('data: {"error": {"message": "lost"}}\n\n', 30), "stream_error", "lost"),
        (OK + chunked("data: {nonsense\n\n", 30), "protocol", "not what OpenAI's API streams"),
        (OK + chunked('data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n', 30), "no_usage", "no usage"),
    ],
)
async def test_every_way_to_fail_has_a_name(reply: bytes, kind: str, detail: str) -> None:
    async with running(Server(reply)) as url:
        (record,) = await ask(url)
    assert record.error == kind
    assert detail in record.detail


async def test_a_server_that_says_nothing_is_given_up() -> None:
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        (record,) = await ask(url, timeout_s=0.1)
        await ended.wait()
    assert record.error == "timeout"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://"])
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="is no address of an OpenAI API"):
        HttpConnections(url)


async def test_https_is_spoken_with_those_that_are_vouched_for(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.issue("server"))
    server = Server(OK + chunked(STREAM, 30))
    async with running(server, tls) as url:
        (stranger,) = await ask(url)
        (record,) = await ask(url, trusted=ssl.create_default_context(cafile=authority.certfile))
    assert stranger.error == "connection"
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.detail
    assert (record.error, record.text) == ("", "ab")
    assert len(server.requests) == 1

"""Each limit of a request over HTTP: what is just within it is served, what is just over it is refused by name."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.replies import ErrorReply
from gateway.request_limits import RequestLimits
from gateway.size_check import check_depth
from tests.integration.fake_inference import MODEL, FakeInference, running_stack

LIMITS = RequestLimits(
    max_header_bytes=4000, max_json_depth=10, max_messages=3, max_tools=2, max_stop_strings=2, max_n=2
)
ASK = {"role": "user", "content": "Hello there"}


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference(), limits=LIMITS) as stack:
        yield stack


def post(stack, path="/v1/chat/completions", headers=None, **fields):
    body = {"model": MODEL, "messages": [ASK], **fields}
    return httpx.post(f"{stack.url}{path}", json=body, headers=headers, timeout=20)


def error_of(response, status):
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    return ErrorReply.model_validate_json(response.content, strict=True).error


def tools(count):
    return [{"type": "function", "function": {"name": f"f{index}"}} for index in range(count)]


@pytest.mark.parametrize(
    ("field", "most", "over", "flag"),
    [
        ("messages", [ASK] * 3, [ASK] * 4, "--max-messages"),
        ("tools", tools(2), tools(3), "--max-tools"),
        ("stop", ["a"] * 2, ["a"] * 3, "--max-stop-strings"),
        ("n", 2, 3, "--max-n"),
    ],
)
def test_counts(stack, field, most, over, flag):
    stack.fake.reset()
    assert post(stack, **{field: most}).status_code == 200
    error = error_of(post(stack, **{field: over}), 400)
    assert (error.type, error.param) == ("invalid_request_error", field)
    assert flag in error.message
    if field in ("messages", "tools"):
        assert post(stack, "/tokenize", **{field: most}).status_code == 200
        assert error_of(post(stack, "/tokenize", **{field: over}), 400).param == field
    if field in ("stop", "n"):
        body = {"model": MODEL, "prompt": "x", field: over}
        assert error_of(httpx.post(f"{stack.url}/v1/completions", json=body), 400).param == field
    assert len(stack.fake.requests) == 1


def nested(levels):
    return {} if levels == 1 else {"a": nested(levels - 1)}


def test_depth(stack):
    stack.fake.reset()
    # The body itself is the first level.
    assert post(stack, metadata=nested(9)).status_code == 200
    error = error_of(post(stack, metadata=nested(10)), 400)
    assert "--max-json-depth" in error.message
    assert len(stack.fake.requests) == 1


JSON = st.recursive(
    st.none() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=12,
)


def depth(value):
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@given(value=JSON, most=st.integers(1, 6))
def test_depth_is_that_of_any_json(value, most):
    def refused():
        try:
            check_depth(json.dumps(value).encode(), value, most)
        except ApiError:
            return True
        return False

    assert refused() == (depth(value) > most)


def test_headers(stack):
    stack.fake.reset()
    assert post(stack, headers={"x-padding": "x" * 3000}).status_code == 200
    error = error_of(post(stack, headers={"x-padding": "x" * 4000}), 431)
    assert "4000 bytes" in error.message
    assert len(stack.fake.requests) == 1


@contextlib.contextmanager
def gateway(*flags):
    """A real process: there is no request yet that the app could refuse. Gives what opens connections to it."""
    command = [sys.executable, "-m", "gateway", "--port", "0", "--router", "127.0.0.1:1", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = int(re.search(r"listening on 127.0.0.1:(\d+)", process.stderr.readline())[1])
            yield lambda: socket.create_connection(("127.0.0.1", port), timeout=20)
        finally:
            process.terminate()
    assert process.returncode == 0


def all_of(connection):
    """What comes until the other side closes."""
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def test_targets_may_be_whole_urls_and_open_no_door():
    with gateway("--api-key", "secret") as connect:
        for target, status in (
            ("http://x/livez", 200),
            ("http://x/livez?a=http://b/c", 200),
            ("https://x:8/v1/models", 401),
            ("http://livez", 200),  # a host, whose page is open
            ("http://x//livez", 401),
        ):
            with connect() as connection:
                connection.sendall(f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
                assert all_of(connection).startswith(f"HTTP/1.1 {status} ".encode()), target


def test_what_is_not_http_is_refused_and_fills_no_log():
    command = [sys.executable, "-m", "gateway", "--port", "0", "--router", "127.0.0.1:1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = int(re.search(r"listening on 127.0.0.1:(\d+)", process.stderr.readline())[1])
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                    connection.sendall(b"\x00\x01 what\r\n\r\n")
                    assert all_of(connection).startswith(b"HTTP/1.1 400 ")
        finally:
            process.terminate()
            said = process.stderr.read()
    assert "Invalid HTTP" not in said
    assert "stopped" in said


def test_headers_that_never_end_are_cut_off():
    with gateway("--max-header-bytes", "4000") as connect, connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-more: " + b"y" * 8100)
        assert connection.recv(1000).startswith(b"HTTP/1.1 4")
        assert b"" in (connection.recv(1000), connection.recv(1000))


WHOLE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
HALF = b"GET /livez HTTP/1.1\r\nhost: x\r\n"


def answer(connection):
    text = b""
    while not text.endswith(b"}"):
        text += connection.recv(65536)
    return text


def served(connection):
    connection.sendall(WHOLE)
    assert answer(connection).startswith(b"HTTP/1.1 200")


def test_headers_that_do_not_come_in_time():
    with gateway("--header-timeout", "2") as connect, contextlib.ExitStack() as stack:
        silent, half, after_one, pipelined, slow, idle = [stack.enter_context(connect()) for _ in range(6)]
        served(idle)
        began = time.monotonic()
        half.sendall(HALF)
        served(after_one)
        after_one.sendall(HALF)
        pipelined.sendall(WHOLE + HALF)
        for byte in HALF[:-1]:  # a byte now and then gives no more time
            slow.sendall(bytes([byte]))
            time.sleep(0.03)
        for connection in (half, after_one, slow, pipelined):
            text = all_of(connection)
            assert b"HTTP/1.1 408 " in text
            assert "within 2 seconds" in json.loads(text.rpartition(b"\r\n\r\n")[2])["error"]["message"]
        assert all_of(silent) == b""
        assert 1.5 < time.monotonic() - began < 10
        # A connection between requests is no request that is late.
        served(idle)


def test_a_body_that_nobody_reads_does_not_hold_the_connection():
    """The answer is there before the body: of a path that does not exist."""
    with gateway("--header-timeout", "1") as connect, connect() as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 10:
                connection.sendall(b" ")
                time.sleep(0.1)
        assert time.monotonic() - began < 9
    with gateway("--header-timeout", "1") as connect, connect() as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"abc")
        served(connection)  # it came in time


def test_a_body_has_one_length():
    """Two of them are how requests are smuggled past a proxy."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    smuggled = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + WHOLE
    with gateway() as connect, connect() as connection:
        connection.sendall(head + smuggled)
        text = all_of(connection)
    assert text.startswith(b"HTTP/1.1 400 ")
    assert text.count(b"HTTP/1.1 ") == 1
    assert b"Content-Length or Transfer-Encoding" in text

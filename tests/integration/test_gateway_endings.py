"""How requests end before their time: clients that leave, deadlines, a router that is away, a gateway that stops."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.integration.fake_inference import MODEL, FakeInference, fake_router, running_stack

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1000}
BATCH = {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 1000}


@pytest.fixture(scope="module")
def stack():
    with running_stack(FakeInference()) as stack:
        yield stack


@pytest.fixture
def fake(stack):
    stack.fake.reset()
    return stack.fake


def until(condition):
    """Waits for something that must come about soon."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def head_of(path, length):
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}", "", "")
    return "\r\n".join(lines).encode()


def running_of(url):
    text = httpx.get(f"{url}/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("quire_num_requests_running ")]
    return float(line.split()[1])


@pytest.mark.parametrize(("path", "body", "calls"), [("chat/completions", CHAT, 1), ("completions", BATCH, 3)])
def test_a_client_that_leaves_a_stream_cancels_its_calls(stack, fake, path, body, calls):
    fake.delay_token = 0.01
    with httpx.Client() as client, client.stream("POST", f"{stack.url}/v1/{path}", json={**body, "stream": True}) as r:
        lines = r.iter_lines()  # when it is collected, httpx closes the connection
        assert next(lines).startswith("data: ")
        assert running_of(stack.url) == 1
    for _ in range(calls):
        assert fake.cancelled.acquire(timeout=10)
    until(lambda: running_of(stack.url) == 0)
    assert 'route="/v1/' + path + '",status="499"' in httpx.get(f"{stack.url}/metrics").text


@pytest.mark.parametrize(("path", "body", "calls"), [("chat/completions", CHAT, 1), ("completions", BATCH, 3)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_byte_cancels_its_calls(stack, fake, path, body, calls, stream):
    fake.delay_start = 60
    data = json.dumps({**body, "stream": stream}).encode()
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head_of(f"/v1/{path}", len(data)) + data)
        until(lambda: len(fake.requests) == calls)
    for _ in range(calls):
        assert fake.cancelled.acquire(timeout=10)
    until(lambda: running_of(stack.url) == 0)


def test_a_client_that_leaves_during_a_long_reply_cancels_its_call(stack, fake):
    fake.gates = [threading.Event()]
    fake.words = ["x"]
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(f"{stack.url}/v1/completions", json={**BATCH, "prompt": "a", "stream": True}, timeout=0.3)
    assert fake.cancelled.acquire(timeout=10)
    fake.gates[0].set()


def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(stack, fake):
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head_of("/v1/completions", 99) + b"{")
    assert httpx.get(f"{stack.url}/livez").status_code == 200
    until(lambda: 'route="/v1/completions",status="499"' in httpx.get(f"{stack.url}/metrics").text)
    assert fake.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_timeout_ends_a_request(stream):
    fake = FakeInference(delay_start=60)
    with running_stack(fake, request_timeout=0.2) as stack:
        response = httpx.post(f"{stack.url}/v1/chat/completions", json={**CHAT, "stream": stream})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        fake.delay_start, fake.delay_token = 0, 60
        response = httpx.post(f"{stack.url}/v1/chat/completions", json={**CHAT, "stream": True})
        assert response.status_code == 200
        assert '"code":"timeout"' in response.text
        assert "[DONE]" not in response.text


PROBES = [("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions")]


@pytest.mark.parametrize("router", ["refuses", "is silent"])
def test_a_router_that_is_away_is_503_soon(router):
    """Refused connections, and ones that are accepted by the kernel and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "127.0.0.1:1" if router == "refuses" else f"127.0.0.1:{silent.getsockname()[1]}"
        with running_stack(FakeInference(), router=address) as stack, httpx.Client(timeout=9) as client:
            for method, path in PROBES:
                response = client.request(method, stack.url + path, json=CHAT if method == "POST" else None)
                assert response.status_code == 503, path
                assert response.headers["retry-after"] == "1"
                assert "127.0.0.1" not in response.text
            assert client.get(f"{stack.url}/livez").status_code == 200


def test_a_router_that_comes_back_is_found_again():
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = placeholder.getsockname()[1]
    with running_stack(FakeInference(), router=f"127.0.0.1:{port}") as stack, httpx.Client(timeout=9) as client:
        assert client.get(f"{stack.url}/health").status_code == 503
        fake = FakeInference()

        async def serve(work):
            async with fake_router(fake, port):
                await asyncio.to_thread(work)

        def work():
            until(lambda: client.get(f"{stack.url}/health").status_code == 200)
            reply = client.post(f"{stack.url}/v1/chat/completions", json={**CHAT, "max_tokens": 2})
            assert reply.status_code == 200

        asyncio.run(serve(work))


@contextlib.contextmanager
def gateway_process(*flags):
    """``python -m gateway`` on a free port; gives the process and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--port", "0", *flags], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        line = process.stderr.readline()
        assert "listening on 127.0.0.1:" in line, line
        yield process, "http://" + line.split("listening on ")[1].split(",")[0]
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()


def test_sigterm_lets_a_running_request_finish():
    fake = FakeInference(gates=[threading.Event()])
    with running_stack(fake) as stack, gateway_process("--router", stack.router) as (process, url):
        body = {**CHAT, "max_tokens": 2, "stream": True}
        with (
            httpx.Client(timeout=20) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply,
        ):
            process.send_signal(signal.SIGTERM)
            until(lambda: refused(url))
            fake.gates[0].set()
            lines = list(reply.iter_lines())
        assert "data: [DONE]" in lines
        assert process.wait(20) == 0


def test_sigterm_ends_what_outlasts_the_shutdown_timeout():
    fake = FakeInference(delay_token=60)
    with running_stack(fake) as stack:
        with gateway_process("--router", stack.router, "--shutdown-timeout", "0.3") as (process, url):
            body = {**CHAT, "stream": True}
            with (
                httpx.Client(timeout=20) as client,
                client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply,
            ):
                process.send_signal(signal.SIGTERM)
                text = reply.read().decode()
            assert '"code":"service_unavailable"' in text
            assert "[DONE]" not in text
            assert process.wait(20) == 0
        assert fake.cancelled.acquire(timeout=10)


def test_a_second_sigterm_ends_at_once():
    fake = FakeInference(delay_token=60)
    with (
        running_stack(fake) as stack,
        gateway_process("--router", stack.router) as (process, url),
        httpx.Client(timeout=20) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json={**CHAT, "stream": True}),
    ):
        process.send_signal(signal.SIGTERM)
        until(lambda: refused(url))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130


def test_sigint_without_work_is_a_clean_stop():
    with gateway_process("--router", "127.0.0.1:1") as (process, url):
        assert httpx.get(f"{url}/livez").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_port_in_use_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "gateway", "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr


def refused(url):
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return True
    return False

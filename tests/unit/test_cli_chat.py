"""quire chat against a small server of the OpenAI API."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire import chat


class FakeAPI(ThreadingHTTPServer):
    """Answers each question with the number of messages so far, or as the test says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.events: list[str] | None = None
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: FakeAPI

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "tiny"}, {"id": "other"}]}))

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.status != 200:
            self._answer(self.server.status, json.dumps({"error": {"message": "the queue is full"}}))
            return
        events = self.server.events
        if events is None:
            pieces = ["", f"{len(self.server.bodies[-1]['messages'])} ", "messages"]
            events = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces]
            events = [*events, json.dumps({"choices": []}), "[DONE]"]
        self._answer(200, ": a comment\n\n" + "".join(f"data: {event}\n\n" for event in events))

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[FakeAPI]:
    with FakeAPI() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_input(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return set_input


def test_a_conversation_grows(api: FakeAPI, say: Any, capsys: pytest.CaptureFixture[str]) -> None:
    say("hello", "", "again", "/new", "afresh", "/exit", "never sent")
    assert chat.main(["--url", api.url, "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "2 messages\n4 messages\n2 messages\n"
    assert [body["messages"][-1]["content"] for body in api.bodies] == ["hello", "again", "afresh"]
    assert api.bodies[1]["messages"][2] == {"role": "assistant", "content": "2 messages"}
    assert {body["model"] for body in api.bodies} == {"tiny"}


def test_end_of_input_ends_it(api: FakeAPI, say: Any) -> None:
    say("hello")
    assert chat.main(["--url", api.url, "--model", "other"]) == 0
    assert api.bodies[0]["model"] == "other"


def test_a_model_that_the_server_has_not_is_named_at_once(api: FakeAPI, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--url", api.url, "--model", "nope"]) == 1
    assert "no model nope; it has tiny, other" in capsys.readouterr().err


def test_the_temperature_is_sent(api: FakeAPI, say: Any) -> None:
    say("hello")
    assert chat.main(["--url", api.url, "--temperature", "0.7"]) == 0
    assert api.bodies[0]["temperature"] == 0.7


def test_a_missing_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeAPI() as closed:
        url = closed.url
    assert chat.main(["--url", url]) == 1
    assert f"no server answers at {url}" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1/v1", "http://"])
def test_what_is_no_address_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["--url", url]) == 1
    assert url in capsys.readouterr().err


def test_a_refusal_is_shown_and_the_line_can_be_sent_again(
    api: FakeAPI, say: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    api.status = 429
    say("hello", "hello")
    assert chat.main(["--url", api.url]) == 1
    assert capsys.readouterr().err.count("429: the queue is full") == 2
    assert [len(body["messages"]) for body in api.bodies] == [1, 1]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (['{"error": {"message": "the worker was lost"}}'], "the worker was lost"),
        (['{"choices": [{"delta": {"content": "half"}}]}'], "the answer broke off"),
        (["nonsense"], "no chunk of a chat: nonsense"),
        (['{"choices": 3}'], "no chunk of a chat"),
        (["[]"], "no chunk of a chat"),
    ],
)
def test_a_broken_answer_is_explained(
    api: FakeAPI, say: Any, events: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    api.events = events
    say("hello")
    assert chat.main(["--url", api.url]) == 1
    assert message in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    api: FakeAPI, say: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = chat.stream_answer

    def interrupted(*args: Any) -> Iterator[str]:
        yield next(stream(*args))
        raise KeyboardInterrupt

    say("hello", "more")
    monkeypatch.setattr(chat, "stream_answer", interrupted)
    assert chat.main(["--url", api.url]) == 0
    assert capsys.readouterr().out == "1  [stopped]\n3  [stopped]\n\n"
    assert api.bodies[1]["messages"][1] == {"role": "assistant", "content": "1 "}

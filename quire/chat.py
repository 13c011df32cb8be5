"""``quire chat``: a conversation in the terminal with a running server, through its OpenAI API."""

import argparse
import json
import os
import ssl
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx

PROG = "quire chat"
# Answers start late when the server is busy, and then keep coming.
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)

Message = dict[str, str]


class ChatError(Exception):
    """The server is not there or refused the request; the message says which."""


def main(argv: list[str]) -> int:
    """Talks until /exit, end of input, or Ctrl-C at the prompt. Returns 1 when the server cannot be used."""
    args = _parser().parse_args(argv)
    url = args.url.rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    opening = [{"role": "system", "content": args.system}] if args.system else []
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    # A proxy for the outside has no business between two programs of one machine.
    local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    try:
        trusted = ssl.create_default_context(cafile=args.ssl_ca_certs) if args.ssl_ca_certs else True
    except OSError as error:
        sys.stderr.write(f"{PROG}: --ssl-ca-certs is {args.ssl_ca_certs}: {error.strerror or error}\n")
        return 1
    with httpx.Client(timeout=_TIMEOUT, headers=headers, trust_env=not local, verify=trusted) as client:
        try:
            model = find_model(client, url, args.model)
        except ChatError as error:
            sys.stderr.write(f"{PROG}: {error}\n")
            return 1
        sys.stderr.write(f"Talking to {model}. Ctrl-C stops an answer; /new starts over; /exit leaves.\n")
        return converse(client, url, model, opening, args.temperature)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Talk to a running server in the terminal.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the OpenAI API (default %(default)s)")
    parser.add_argument("--model", help="which of the server's models (default: the first)")
    parser.add_argument("--system", help="a system message to open the conversation with")
    parser.add_argument("--temperature", type=float, default=0.2, help="of the answers' words (default %(default)s)")
    parser.add_argument(
        "--api-key", default=os.environ.get("QUIRE_API_KEY"), help="sent as a bearer token (default: QUIRE_API_KEY)"
    )
    parser.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="PEM; authorities that vouch for https servers (default: those of httpx)"
    )
    return parser


def find_model(client: httpx.Client, url: str, wanted: str | None) -> str:
    """The wanted one of the server's models, or its first. Raises ChatError when there is no such server or model."""
    try:
        answer = client.get(f"{url}/models")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ChatError(f"no server answers at {url} ({error}); start one with `quire serve`, or give --url") from error
    _check(answer)
    try:
        names = [str(model["id"]) for model in answer.json()["data"]]
        if wanted is not None and wanted not in names:
            raise ChatError(f"the server has no model {wanted}; it has {', '.join(names)}")
        return wanted or names[0]
    except (ValueError, LookupError, TypeError) as error:
        raise ChatError(f"{url}/models names no model; is this the address of an OpenAI API, ending in /v1?") from error


def converse(client: httpx.Client, url: str, model: str, opening: list[Message], temperature: float) -> int:
    """Reads lines from standard input and streams the answers, until the input or the person has had enough.

    Returns:
        The exit status: 1 when nobody was there to see that the last line was not answered.
    """
    messages = list(opening)
    status = 0
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return status
        if line == "/exit":
            return status
        if line == "/new":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            status = 0
            try:
                messages.append(
                    {"role": "assistant", "content": _show_answer(client, url, model, messages, temperature)}
                )
            except ChatError as error:
                messages.pop()  # so that the line can be sent again
                sys.stderr.write(f"{PROG}: {error}\n")
                status = 0 if sys.stdin.isatty() else 1


def _show_answer(client: httpx.Client, url: str, model: str, messages: list[Message], temperature: float) -> str:
    """Prints an answer as it comes and returns it; Ctrl-C leaves it as far as it got."""
    parts: list[str] = []
    try:
        for text in stream_answer(client, url, model, messages, temperature):
            parts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" [stopped]")
    sys.stdout.write("\n")
    return "".join(parts)


def stream_answer(
    client: httpx.Client, url: str, model: str, messages: list[Message], temperature: float
) -> Iterator[str]:
    """The pieces of the model's answer, as they come. Raises ChatError when the server refuses or is lost."""
    body = {"model": model, "messages": messages, "temperature": temperature, "stream": True}
    try:
        with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
            if answer.is_error:
                answer.read()
                _check(answer)
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                yield from _text(data)
    except httpx.TransportError as error:
        raise ChatError(f"the server at {url} was lost ({error})") from error
    raise ChatError("the answer broke off")


def _text(data: str) -> Iterator[str]:
    """The text in one chunk of a stream, if it has any."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise ChatError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            if content := choice["delta"].get("content"):
                yield content
    except (ValueError, LookupError, TypeError) as error:
        raise ChatError(f"the server sent what is no chunk of a chat: {data[:200]}") from error


def _check(answer: httpx.Response) -> None:
    """Raises ChatError, with the server's own words where it has some, for an error status."""
    if not answer.is_error:
        return
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = answer.reason_phrase
    raise ChatError(f"{answer.status_code}: {message}")

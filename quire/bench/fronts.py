"""Ways to a server: a request from its start to its end, through any OpenAI API or through Quire's gRPC."""

import asyncio
import json
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import grpc

from protos.api_keys import key_metadata
from protos.channel import CHANNEL_OPTIONS, open_channel
from protos.inference_pb2 import Chat, ChatMessage, GenerateRequest, ListModelsRequest, OutputOptions, TokenIds
from protos.inference_pb2_grpc import InferenceStub
from protos.sampling_pb2 import SamplingParams, StopConditions
from protos.tls import ClientTls, explain_failure
from quire.bench.http_connections import HttpConnections, Reply
from quire.bench.records import Job, Record, RequestFailed

TIMEOUT_S = 600.0
ENDPOINTS = {"chat": "/chat/completions", "completions": "/completions"}
_ASKED_S = 10.0  # for the models' names


@dataclass(frozen=True)
class Sampling:
    """How all outputs are chosen. ``ignore_eos``: none ends before its length, where the server knows this field."""

    temperature: float = 0.0
    top_p: float | None = None
    ignore_eos: bool = True


class Front(Protocol):
    """A way to a server, for use as an asynchronous context. ``model``: as the server calls it."""

    model: str

    async def __aenter__(self) -> "Front": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def models(self) -> list[str]:
        """The names that the server has. Raises RequestFailed."""

    async def run(self, job: Job, record: Record) -> None:
        """Sends a request, reads all of it, and notes it in the record, also that and how it failed."""


class GrpcFront:
    """Streams of the router's Generate, all over one connection.

    Args:
        address: host:port.
        model: as the server calls it.
        key: empty: none is shown.
        tls: None: there is none.
    """

    def __init__(
        self,
        address: str,
        model: str,
        sampling: Sampling = Sampling(),
        key: str = "",
        tls: ClientTls | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.model = model
        self._address, self._sampling, self._timeout_s = address, sampling, timeout_s
        self._metadata, self._tls = key_metadata(key), tls

    async def __aenter__(self) -> "GrpcFront":
        self._channel = open_channel(self._address, CHANNEL_OPTIONS, self._tls)
        self._inference = InferenceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def models(self) -> list[str]:
        try:
            listed = await self._inference.ListModels(ListModelsRequest(), timeout=_ASKED_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        return [model.name for model in listed.models]

    async def run(self, job: Job, record: Record) -> None:
        choice = self._sampling
        request = GenerateRequest(
            model=self.model,
            sampling=SamplingParams(temperature=choice.temperature, top_p=choice.top_p),
            stopping=StopConditions(max_tokens=job.max_tokens, ignore_eos=choice.ignore_eos),
            output=OutputOptions(token_ids=True),
            skip_reading_prefix_cache=not job.reads_cache,
        )
        _put_prompt(request, job)
        finished = False
        try:
            call = self._inference.Generate(request, timeout=self._timeout_s, metadata=self._metadata)
            async for response in call:
                for event in response.events:
                    if event.HasField("delta"):
                        record.times.append(time.monotonic())
                        record.token_ids.extend(event.delta.token_ids)
                        record.text += event.delta.text
                    elif event.HasField("finished"):
                        usage, finished = event.finished.usage, True
                        record.tokens, record.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
                        record.cached_tokens = usage.cached_tokens
            _check_complete(record, finished)
        except grpc.aio.AioRpcError as error:
            _note(record, self._failure(error))
        except RequestFailed as failure:
            _note(record, failure)
        record.ended = time.monotonic()

    def _failure(self, error: grpc.aio.AioRpcError) -> RequestFailed:
        details = explain_failure(error.details() or "", self._tls)
        return RequestFailed(error.code().name.lower(), f"{self._address}: {details}")


def _put_prompt(request: GenerateRequest, job: Job) -> None:
    if isinstance(job.prompt, str):
        request.text = job.prompt
    elif job.prompt and isinstance(job.prompt[0], dict):
        messages: Iterable[Any] = job.prompt
        turns = [ChatMessage(role=message["role"], content=message["content"]) for message in messages]
        request.chat.CopyFrom(Chat(messages=turns))
    else:
        ids: Any = job.prompt
        request.token_ids.CopyFrom(TokenIds(ids=ids))


class HttpFront:
    """Streams of an OpenAI API, over connections that are used again.

    Args:
        base_url: up to the endpoint, say http://127.0.0.1:8000/v1.
        model: as the server calls it.
        endpoint: a name in ``ENDPOINTS``.
        key: empty: none is shown.
        trusted: whose certificates are trusted, for https; None: those of the system.

    Raises:
        ValueError: the URL is none.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        endpoint: str = "completions",
        sampling: Sampling = Sampling(),
        key: str = "",
        trusted: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.model = model
        self._chats, self._path, self._timeout_s = endpoint == "chat", ENDPOINTS[endpoint], timeout_s
        self._connections = HttpConnections(base_url, trusted, {"Authorization": f"Bearer {key}"} if key else {})
        self._fields: dict[str, Any] = {"temperature": sampling.temperature}
        if sampling.top_p is not None:
            self._fields["top_p"] = sampling.top_p
        if sampling.ignore_eos:  # not OpenAI's: sent only when it is wanted
            self._fields["ignore_eos"] = True

    async def __aenter__(self) -> "HttpFront":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connections.close()

    async def models(self) -> list[str]:
        try:
            async with asyncio.timeout(_ASKED_S), self._connections.request("GET", "/models") as reply:
                answer = await reply.read()
                if reply.status != 200:
                    refused = _refused(reply, answer)
                    raise RequestFailed(refused.kind, f"GET /models: {refused}; does --base-url end in /v1?")
                return [str(model["id"]) for model in json.loads(answer)["data"]]
        except TimeoutError as error:
            raise RequestFailed("timeout", f"/models was not answered within {_ASKED_S:.0f} s") from error
        except OSError as error:
            raise RequestFailed("connection", str(error)) from error
        except (ValueError, LookupError, TypeError) as error:
            raise RequestFailed("protocol", f"/models names no model ({error}); is this an OpenAI API?") from error

    async def run(self, job: Job, record: Record) -> None:
        body = {
            "model": self.model, ("messages" if self._chats else "prompt"): job.prompt, "max_tokens": job.max_tokens,
            **self._fields, **job.fields, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if not job.reads_cache:
            body["skip_reading_prefix_cache"] = True
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._connections.request("POST", self._path, json.dumps(body).encode()) as reply:
                    if reply.status != 200:
                        raise _refused(reply, await reply.read())
                    _check_complete(record, await self._read(reply, record))
        except RequestFailed as failure:
            _note(record, failure)
        except TimeoutError:
            _note(record, RequestFailed("timeout", f"no end within {self._timeout_s:.0f} s"))
        except OSError as error:
            _note(record, RequestFailed("disconnected" if record.times else "connection", str(error)))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            _note(record, RequestFailed("protocol", f"the answer is not what OpenAI's API streams: {error}"))
        record.ended = time.monotonic()

    async def _read(self, reply: Reply, record: Record) -> bool:
        """Notes the events of a stream. Returns whether its last one came."""
        done = False
        async for line in reply.lines():
            if done or not line.startswith(b"data:"):
                continue  # to the end, so that the connection can be used again
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            event = json.loads(data)
            if event.get("error"):
                raise RequestFailed("stream_error", _words(event))
            for choice in event.get("choices", ()):
                if text := self._output(choice):
                    record.times.append(time.monotonic())
                    record.text += text
            if usage := event.get("usage"):
                record.tokens, record.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return done

    def _output(self, choice: dict[str, Any]) -> str:
        """What a chunk's choice adds to the output; reasoning and calls of tools are output, too."""
        if not self._chats:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        said: str = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        return said or (json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else "")


def _check_complete(record: Record, done: bool) -> None:
    """Raises RequestFailed when the stream lacks its end, or the counts without which it cannot be measured."""
    if not done:
        raise RequestFailed("cut_off", "the stream ended without its last event")
    if not record.prompt_tokens:
        raise RequestFailed("no_usage", "the answer has no usage: the server does not count tokens in streams")
    if not record.times:  # output without a text, say an end-of-sequence token alone
        record.times.append(time.monotonic())


def _note(record: Record, failure: RequestFailed) -> None:
    record.error, record.detail = failure.kind, str(failure)


def _refused(reply: Reply, answer: bytes) -> RequestFailed:
    try:
        words = _words(json.loads(answer))
    except ValueError:
        words = answer[:200].decode(errors="replace")
    return RequestFailed(f"http_{reply.status}", words)


def _words(answer: Any) -> str:
    """What an error's body says: OpenAI's form, or whatever it is."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:500]

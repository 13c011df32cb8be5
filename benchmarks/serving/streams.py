"""One request at a time, from its start to its end: through gRPC, or through the gateway's server-sent events."""

import asyncio
import json
import time
from types import TracebackType
from typing import Protocol

import grpc

from benchmarks.serving.records import Job, Record
from protos.channel import CHANNEL_OPTIONS
from protos.inference_pb2 import GenerateRequest, OutputOptions, TokenIds
from protos.inference_pb2_grpc import InferenceStub
from protos.sampling_pb2 import SamplingParams, StopConditions

_TIMEOUT_S = 600.0


class Front(Protocol):
    """A way to the servers, for use as an asynchronous context."""

    async def __aenter__(self) -> "Front": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def run(self, job: Job, began: float) -> Record:
        """Sends a request and reads all of it. Raises ConnectionError when it does not end as it should."""


class GrpcFront:
    """Streams of the router's Generate, all over one connection."""

    def __init__(self, address: str, model: str) -> None:
        self._address, self._model = address, model

    async def __aenter__(self) -> "GrpcFront":
        self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        self._inference = InferenceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def run(self, job: Job, began: float) -> Record:
        record = Record(began)
        request = GenerateRequest(
            model=self._model,
            token_ids=TokenIds(ids=job.prompt),
            sampling=SamplingParams(temperature=0.0),
            stopping=StopConditions(max_tokens=job.max_tokens, ignore_eos=True),
            output=OutputOptions(token_ids=True),
            skip_reading_prefix_cache=not job.reads_cache,
        )
        async for response in self._inference.Generate(request, timeout=_TIMEOUT_S):
            for event in response.events:
                if event.HasField("delta"):
                    record.times.append(time.monotonic())
                    record.token_ids.extend(event.delta.token_ids)
                    record.text += event.delta.text
                elif event.HasField("finished"):
                    record.tokens = event.finished.usage.completion_tokens
        return _complete(record, job)


class SseFront:
    """Streamed completions over HTTP, each over a connection of its own."""

    def __init__(self, address: str, model: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port, self._model = int(port), model

    async def __aenter__(self) -> "SseFront":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def run(self, job: Job, began: float) -> Record:
        body = json.dumps(
            {
                "model": self._model, "prompt": job.prompt, "max_tokens": job.max_tokens, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
                "skip_reading_prefix_cache": not job.reads_cache,
            }
        )  # fmt: skip
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
            try:
                writer.write(
                    f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
                )
                return _complete(await self._read(reader, Record(began)), job)
            finally:
                writer.close()

    async def _read(self, reader: asyncio.StreamReader, record: Record) -> Record:
        status = await reader.readline()
        if b" 200 " not in status:
            raise ConnectionError(f"the gateway answered {status.decode().strip()}: {(await reader.read()).decode()}")
        while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
            if not line.startswith(b"data: "):
                continue  # headers, the sizes of chunks, and the ends of events
            event = json.loads(line[6:])
            if "error" in event:
                raise ConnectionError(f"the gateway's stream ended with {event['error']}")
            if event["choices"] and event["choices"][0]["text"]:
                record.times.append(time.monotonic())
                record.text += event["choices"][0]["text"]
            if event.get("usage"):
                record.tokens = event["usage"]["completion_tokens"]
        return record


FRONTS: dict[str, type[GrpcFront] | type[SseFront]] = {"gRPC": GrpcFront, "SSE": SseFront}


def _complete(record: Record, job: Job) -> Record:
    if record.tokens != job.max_tokens or not record.times:
        raise ConnectionError(f"an output has {record.tokens} tokens, of {job.max_tokens} that were asked for")
    return record

"""Virtual workers on the machine's clock, behind HTTP or behind gRPC: one engine for every router that is compared.

    python -m benchmarks.routing.timed_workers --front http --workers 8 --scale 10 --cache-blocks 2000

One process serves all of them, each on a port of its own, and prints the ports. Their clock runs ``--scale`` times as
fast as the machine's, and a token on the wire stands for ``--factor`` tokens of the engine, so that a comparison does
not measure arithmetic or tokenizing. A sequence sends its first token when it has it, and all others at its end. When
standard input ends, the process prints what it did.
"""

import argparse
import asyncio
import json
import secrets
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.routing.virtual_worker import Job, Speed, VirtualWorker
from protos import sampling_pb2, worker_pb2, worker_pb2_grpc
from protos.channel import SERVER_OPTIONS
from protos.prefix import TOKEN_BYTES, block_hashes
from tests.doubles.processes import free_port

MODEL = "demo"
FIRST_TOKEN = 1000  # an ordinary word in the demo model's vocabulary
MAX_SEQS = 320
Progress = Callable[[list[Job], list[Job], list[Job]], None]


class TimedWorker:
    """A virtual worker whose events come when the machine's clock says so.

    Args:
        number, speed: as a virtual worker's.
        block_size: tokens a block, on the wire.
        factor: its tokens for one on the wire.
        scale: its seconds in one of the machine's.

    Attributes:
        heard: told who was admitted, got a first token and ended.
        late_s: by how much each event came late, in the machine's seconds.
    """

    def __init__(self, number: int, speed: Speed, block_size: int, factor: int, scale: float) -> None:
        self.engine = VirtualWorker(number, speed, block_size * factor, self._schedule)
        self.block_size = block_size
        self.factor = factor
        self.scale = scale
        self.heard: Progress = lambda admitted, first, ended: None
        self.late_s: list[float] = []
        self.jobs: list[Job] = []
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()

    def submit(self, names: Sequence[bytes], prompt_tokens: int, output_tokens: int) -> Job:
        """Takes a prompt of so many tokens on the wire, with the names of its full blocks."""
        now = (self._loop.time() - self._start) * self.scale
        job = Job(now, prompt_tokens * self.factor, output_tokens, list(names))
        self.jobs.append(job)
        self.engine.submit(job, now)
        return job

    def _schedule(self, at: float, engine: VirtualWorker, number: int) -> None:
        self._loop.call_at(self._start + at / self.scale, self._on_event, at, number)

    def _on_event(self, at: float, number: int) -> None:
        # Steps end when they should, however late this is: delays do not add up.
        done = self.engine.on_event(number, at)
        if done is not None:
            self.late_s.append(self._loop.time() - self._start - at / self.scale)
            self.heard(*done)


class HttpFront:
    """OpenAI's completions over server-sent events; which worker is asked, the port says."""

    def __init__(self, workers: dict[int, TimedWorker]) -> None:
        self._workers = workers
        self._streams: dict[int, asyncio.Queue[bytes | None]] = {}
        for worker in workers.values():
            worker.heard = self._on_progress
        known = ("/health", "/v1/models", "/server_info", "/get_server_info", "/model_info", "/get_model_info")
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                *(Route(path, self._about, methods=["GET"]) for path in known),
            ]
        )

    async def _about(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL})

    async def _tokenize(self, request: Request) -> Response:
        """As vLLM's server has it: some routers ask for a prompt's tokens before they choose."""
        ids = _ids((await request.json())["prompt"])
        return JSONResponse({"tokens": ids.tolist(), "count": len(ids), "max_model_len": 1 << 17})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        ids = _ids(body["prompt"])
        output = body.get("max_tokens") or body.get("max_completion_tokens") or 1
        server: tuple[str, int] = request.scope["server"]
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        worker = self._workers[server[1]]
        job = worker.submit(block_hashes(ids.tobytes(), worker.block_size), len(ids), output)
        self._streams[id(job)] = pieces

        async def stream() -> AsyncIterator[bytes]:
            while (piece := await pieces.get()) is not None:
                yield piece

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _on_progress(self, admitted: list[Job], first: list[Job], ended: list[Job]) -> None:
        for job in first:
            self._streams[id(job)].put_nowait(_sse(" word", None))
        for job in ended:
            pieces = self._streams.pop(id(job))
            pieces.put_nowait(_sse(" word" * (job.output_tokens - 1), "length"))
            pieces.put_nowait(b"data: [DONE]\n\n")
            pieces.put_nowait(None)


def _ids(prompt: str) -> "array[int]":
    """A token for each word, the same for equal ones."""
    return array("I", (hash(word) & 0x7FFFFFFF for word in prompt.split()))


def _sse(text: str, reason: str | None) -> bytes:
    chunk = {"id": "c", "object": "text_completion", "created": 0, "model": MODEL}
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    return b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\n\n"


class GrpcFront(worker_pb2_grpc.WorkerServicer):
    """The project's own protocol, for one router at a time."""

    def __init__(self, worker: TimedWorker) -> None:
        self._worker = worker
        self._slots: dict[int, tuple[int, int]] = {}  # by job: slot and generation
        self._out: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue()
        self._epoch = secrets.randbits(63)
        self._sequence = 0
        self._subscribed = False
        worker.heard = self._on_progress

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        engine, factor = self._worker.engine, self._worker.factor
        credit = asyncio.Semaphore(0)
        yield worker_pb2.WorkerMessage(
            hello=worker_pb2.Hello(
                protocol_version=2, worker_id=f"worker-{engine.number}", epoch=self._epoch, model=MODEL,
                manifest_hash=MODEL, vocab_size=49152, block_size=self._worker.block_size, num_blocks=engine.num_blocks,
                max_model_len=1 << 17, max_num_seqs=MAX_SEQS, max_slots=MAX_SEQS,
                max_num_batched_tokens=engine.speed.budget // factor, enable_prefix_caching=True,
            )
        )  # fmt: skip
        reader = asyncio.create_task(self._read(request_iterator, credit))
        try:
            while True:
                message = await self._out.get()
                if message.WhichOneof("message") in ("step_batch", "kv_events"):
                    await credit.acquire()
                yield message
        finally:
            reader.cancel()

    async def _read(self, messages: AsyncIterator[worker_pb2.RouterMessage], credit: asyncio.Semaphore) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    submit, prompt = message.submit, message.submit.prompt_token_ids
                    names = block_hashes(prompt, self._worker.block_size, submit.cache_salt)
                    job = self._worker.submit(names, len(prompt) // TOKEN_BYTES, submit.max_tokens)
                    self._slots[id(job)] = submit.slot, submit.generation
                case "credit":
                    for _ in range(message.credit.step_batches):
                        credit.release()
                case "ping":
                    pong = worker_pb2.Pong(nonce=message.ping.nonce, step=self._worker.engine.step, load=self._load())
                    self._out.put_nowait(worker_pb2.WorkerMessage(pong=pong))
                case "subscribe_kv_events":
                    self._subscribed = True
                    engine = self._worker.engine
                    self._tell(snapshot=True, cleared=True, stored=b"".join(engine.names()))

    def _load(self) -> worker_pb2.Load:
        engine, factor = self._worker.engine, self._worker.factor
        return worker_pb2.Load(
            running=len(engine.prefilling) + len(engine.decoding), waiting=len(engine.waiting),
            queued_prefill_tokens=engine.queued_prefill_tokens // factor, free_blocks=engine.available_blocks,
            prefill_tokens=engine.prefill_tokens // factor, busy_us=int(engine.busy_s / self._worker.scale * 1e6),
        )  # fmt: skip

    def _on_progress(self, admitted: list[Job], first: list[Job], ended: list[Job]) -> None:
        batch = worker_pb2.StepBatch(step=self._worker.engine.step, load=self._load())
        factor = self._worker.factor
        for job in admitted:
            slot, generation = self._slots[id(job)]
            batch.admitted.add(slot=slot, generation=generation, cached_tokens=job.cached_tokens // factor)
        for job in first:
            self._add_row(batch, job, 0, 1)
        for job in ended:
            if job.output_tokens > 1:
                self._add_row(batch, job, 1, job.output_tokens - 1)
            slot, generation = self._slots.pop(id(job))
            usage = sampling_pb2.Usage(
                prompt_tokens=job.prompt_tokens // factor, completion_tokens=job.output_tokens,
                cached_tokens=job.cached_tokens // factor,
            )  # fmt: skip
            reason = sampling_pb2.FINISH_REASON_LENGTH
            batch.finished.add(slot=slot, generation=generation, reason=reason, usage=usage)
        self._out.put_nowait(worker_pb2.WorkerMessage(step_batch=batch))
        engine = self._worker.engine
        if self._subscribed and (engine.stored or engine.removed):
            self._tell(removed=b"".join(engine.removed), stored=b"".join(engine.stored))

    def _add_row(self, batch: worker_pb2.StepBatch, job: Job, start: int, count: int) -> None:
        slot, generation = self._slots[id(job)]
        batch.slots.append(slot)
        batch.generations.append(generation)
        batch.first_indices.append(start)
        batch.counts.append(count)
        batch.token_ids.extend([FIRST_TOKEN] * count)

    def _tell(self, **changes: Any) -> None:
        self._worker.engine.stored.clear()
        self._worker.engine.removed.clear()
        self._sequence += 1
        events = worker_pb2.KvEvents(epoch=self._epoch, sequence=self._sequence, **changes)
        self._out.put_nowait(worker_pb2.WorkerMessage(kv_events=events))


async def serve(args: argparse.Namespace) -> None:
    """Serves until standard input ends."""
    speed = Speed(cache_tokens=args.cache_blocks * args.block_size * args.factor)
    workers = {
        free_port(): TimedWorker(number, speed, args.block_size, args.factor, args.scale)
        for number in range(args.workers)
    }
    stops: list[Callable[[], Any]] = []
    tasks: list[asyncio.Task[None]] = []
    if args.front == "http":
        app = HttpFront(workers).app
        for port in workers:
            server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="critical", access_log=False))
            tasks.append(asyncio.create_task(server._serve()))
            stops.append(lambda server=server: setattr(server, "should_exit", True))  # type: ignore[misc]
    else:
        for port, worker in workers.items():
            front = grpc.aio.server(options=SERVER_OPTIONS)
            worker_pb2_grpc.add_WorkerServicer_to_server(GrpcFront(worker), front)
            front.add_insecure_port(f"127.0.0.1:{port}")
            await front.start()
            stops.append(lambda front=front: tasks.append(asyncio.create_task(front.stop(0))))  # type: ignore[misc]
    print(json.dumps(list(workers)), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    jobs = [job for worker in workers.values() for job in worker.jobs]
    late = sorted(seconds for worker in workers.values() for seconds in worker.late_s) or [0.0]
    print(
        json.dumps(
            {
                "prompt_tokens": sum(job.prompt_tokens for job in jobs),
                "cached_tokens": sum(job.cached_tokens for job in jobs),
                "most": max(len(worker.jobs) for worker in workers.values()) * len(workers) / max(1, len(jobs)),
                "late_ms": 1e3 * late[int(0.99 * len(late))],
            }
        ),
        flush=True,
    )
    for stop in stops:
        stop()
    await asyncio.gather(*tasks)


def main() -> None:
    """Parses the flags and serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front", choices=("http", "grpc"), required=True)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--scale", type=float, required=True, help="the engine's seconds in one of the machine's")
    parser.add_argument("--block-size", type=int, default=16, help="tokens on the wire")
    parser.add_argument("--factor", type=int, default=1, help="the engine's tokens for one on the wire")
    parser.add_argument("--cache-blocks", type=int, required=True, help="of each worker")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()

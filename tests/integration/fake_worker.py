"""A Worker server without a model: what it generates is a function of the prompt, and tests script its misdeeds."""

import asyncio
import secrets
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import sampling_pb2, worker_pb2, worker_pb2_grpc
from protos.channel import LOADING, add_port, make_server
from protos.tls import ServerTls

STOP, LENGTH = sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH
Key = tuple[int, int]


def count_up(prompt: list[int], index: int) -> int:
    """Output token number ``index`` for a prompt; ordinary words in the demo model's vocabulary."""
    return 1000 + (sum(prompt) + index) % 1000


@dataclass
class Running:
    """A sequence in the fake engine."""

    submit: worker_pb2.Submit
    prompt: list[int]
    emitted: int = 0


@dataclass
class Stream:
    """One router's stream."""

    credit: int = 0
    running: dict[Key, Running] = field(default_factory=dict)
    rows: dict[Key, tuple[int, list[int]]] = field(default_factory=dict)
    admitted: list[worker_pb2.Admitted] = field(default_factory=list)
    finished: list[worker_pb2.FinishedSlot] = field(default_factory=list)
    replies: list[worker_pb2.WorkerMessage] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, **message: Any) -> None:
        """Sends a message as it is, past all rules."""
        self.replies.append(worker_pb2.WorkerMessage(**message))
        self.wake.set()

    def finish(self, key: Key, reason: int, *, stop_token_id: int | None = None, error: str = "") -> None:
        """Ends a sequence, telling the router."""
        seq = self.running.pop(key)
        usage = sampling_pb2.Usage(prompt_tokens=len(seq.prompt), completion_tokens=seq.emitted, cached_tokens=3)
        row = worker_pb2.FinishedSlot(slot=key[0], generation=key[1], reason=reason, usage=usage, error=error)
        if stop_token_id is not None:
            row.stop_token_id = stop_token_id
        self.finished.append(row)
        self.wake.set()


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Runs while used as an async context manager.

    Args:
        token: output token by prompt and index.
        merge: steps whose tokens go into one batch.
        reject: reasons with which the next Submits are refused.
        tls: of its port.
        loading: so many streams are refused, as if the model were loaded meanwhile.
        hello: fields that differ from the usual ones.

    Attributes:
        gate: the engine steps while it is set.
        deaf: messages are not read any more, pings not answered.
        mute: pings are not answered, all else goes on.
        dies_at: output index of the token that kills this worker when it is computed.
        pong: fields of the answers to pings.
        subscriptions: how often a snapshot of the prefix cache was asked for.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        token: Callable[[list[int], int], int] = count_up,
        merge: int = 1,
        reject: list[int] | None = None,
        tls: ServerTls | None = None,
        loading: int = 0,
        **hello: Any,
    ) -> None:
        self.port = port
        self.token = token
        self.merge = merge
        self.reject = reject or []
        self.tls = tls
        self.loading = loading
        self.hello = {
            "protocol_version": 2, "worker_id": "fake", "epoch": secrets.randbits(63), "model": "demo",
            "manifest_hash": "m", "vocab_size": 49152, "block_size": 16, "num_blocks": 100, "max_model_len": 512,
            "max_num_seqs": 4, "max_num_batched_tokens": 512, "max_slots": 4, **hello,
        }  # fmt: skip
        self.gate = asyncio.Event()
        self.gate.set()
        self.deaf = False
        self.mute = False
        self.dies_at: int | None = None
        self.pong: dict[str, Any] = {}
        self.subscriptions = 0
        self.streams: list[Stream] = []
        self.submits: list[worker_pb2.Submit] = []
        self.cancels: list[worker_pb2.CancelSlot] = []
        self.credits: list[int] = []
        self.batches = 0
        self._changed = asyncio.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def stream(self) -> Stream:
        """The newest stream."""
        return self.streams[-1]

    async def __aenter__(self) -> "FakeWorker":
        self._server = make_server(self.tls)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = add_port(self._server, self.address, self.tls)
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Ends at once, streams and all."""
        await self._server.stop(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until something that routers do to this worker makes a condition true."""
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    # ---- the service ----

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        if self.loading:
            self.loading -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "still loading", LOADING)
        stream = Stream()
        self.streams.append(stream)
        tasks = [asyncio.create_task(self._read(stream, request_iterator)), asyncio.create_task(self._run(stream))]
        try:
            yield worker_pb2.WorkerMessage(hello=worker_pb2.Hello(**self.hello))
            while True:
                while stream.replies:
                    yield stream.replies.pop(0)
                pending = stream.rows or stream.admitted or stream.finished
                full = any(len(ids) >= self.merge for _, ids in stream.rows.values())
                if pending and stream.credit and (full or stream.finished or stream.admitted):
                    stream.credit -= 1
                    self.batches += 1
                    yield worker_pb2.WorkerMessage(step_batch=self._batch(stream))
                    continue
                stream.wake.clear()
                await stream.wake.wait()
        finally:
            for task in tasks:
                task.cancel()
            self._changed.set()

    async def _read(self, stream: Stream, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        async for message in messages:
            if self.deaf:
                continue
            match message.WhichOneof("message"):
                case "submit":
                    self._on_submit(stream, message.submit)
                case "cancel":
                    self.cancels.append(message.cancel)
                    key = (message.cancel.slot, message.cancel.generation)
                    if key in stream.running:
                        stream.finish(key, sampling_pb2.FINISH_REASON_CANCELLED)
                case "credit":
                    self.credits.append(message.credit.step_batches)
                    stream.credit += message.credit.step_batches
                case "subscribe_kv_events":
                    self.subscriptions += 1
                case "ping" if not self.mute:
                    stream.send(pong=worker_pb2.Pong(nonce=message.ping.nonce, **self.pong))
            stream.wake.set()
            self._changed.set()

    def _on_submit(self, stream: Stream, submit: worker_pb2.Submit) -> None:
        self.submits.append(submit)
        key = (submit.slot, submit.generation)
        if self.reject:
            rejected = worker_pb2.Rejected(slot=key[0], generation=key[1], reason=self.reject.pop(0), message="no")
            stream.send(rejected=rejected)
            return
        assert submit.slot not in {slot for slot, _ in stream.running}, "the slot is in use"
        ids = array("I", submit.prompt_token_ids).tolist()
        start = len(ids) - submit.num_emitted
        stream.running[key] = Running(submit, ids[:start], submit.num_emitted)
        stream.admitted.append(worker_pb2.Admitted(slot=key[0], generation=key[1], cached_tokens=3))

    async def _run(self, stream: Stream) -> None:
        """The engine: each step gives each sequence a token."""
        while True:
            if not (stream.running and self.gate.is_set()):
                await asyncio.sleep(0.001)
                continue
            if any(seq.emitted == self.dies_at for seq in stream.running.values()):
                self.death = asyncio.create_task(self.kill())
                return
            for key, seq in list(stream.running.items()):
                token_id = self.token(seq.prompt, seq.emitted)
                stream.rows.setdefault(key, (seq.emitted, []))[1].append(token_id)
                seq.emitted += 1
                if token_id in seq.submit.stop_token_ids:
                    stream.finish(key, STOP, stop_token_id=token_id)
                elif seq.emitted == seq.submit.max_tokens:
                    stream.finish(key, LENGTH)
            stream.wake.set()
            await asyncio.sleep(0)

    def _batch(self, stream: Stream) -> worker_pb2.StepBatch:
        batch = step_batch(
            [(slot, generation, first, ids) for (slot, generation), (first, ids) in stream.rows.items()],
            admitted=stream.admitted,
            finished=stream.finished,
        )
        stream.rows, stream.admitted, stream.finished = {}, [], []
        return batch


def step_batch(rows: list[tuple[int, int, int, list[int]]], **fields: Any) -> worker_pb2.StepBatch:
    """A StepBatch of rows (slot, generation, first index, token ids)."""
    return worker_pb2.StepBatch(
        slots=[slot for slot, _, _, _ in rows],
        generations=[generation for _, generation, _, _ in rows],
        first_indices=[first for _, _, first, _ in rows],
        counts=[len(ids) for _, _, _, ids in rows],
        token_ids=[token_id for _, _, _, ids in rows for token_id in ids],
        **fields,
    )

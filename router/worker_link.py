"""The router's end of one worker's stream: handshake, slots, credits, heartbeats, and the rows of each step.

Made anew for as long as the router lives. What runs on a link that breaks fails; a worker that comes back under another
epoch is another worker.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from protos import sampling_pb2, worker_pb2, worker_pb2_grpc
from protos.channel import CHANNEL_OPTIONS
from router.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestError, Unavailable
from router.request import Choice, ProtocolError

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
CREDIT_WINDOW = 32
PING_INTERVAL = 1.0
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 2.0

Outgoing = worker_pb2.RouterMessage


class LinkBroken(Exception):
    """The stream cannot go on; the message says why."""


@dataclass(slots=True)
class _Running:
    choice: Choice
    generation: int
    cancelled: bool = False


class WorkerLink:
    """One worker, for as long as the router lives.

    Args:
        address: host:port.
        accepts: checks a new worker's Hello; returns why it cannot be used, or None.
        on_change: called when the link became ready, got a free slot, or was lost.
        requeue: takes back a choice that the worker did not begin.
        silence: seconds without an answer after which the worker counts as lost.
    """

    def __init__(
        self,
        address: str,
        accepts: Callable[[worker_pb2.Hello], str | None],
        on_change: Callable[[], None],
        requeue: Callable[[Choice], None],
        silence: float,
    ) -> None:
        self.address = address
        self.hello: worker_pb2.Hello | None = None
        self.load = worker_pb2.Load()
        self._accepts = accepts
        self._on_change = on_change
        self._requeue = requeue
        self._silence = silence
        self._draining = False
        self._running: dict[int, _Running] = {}
        self._slot_of: dict[Choice, int] = {}
        self._free_slots: list[int] = []
        self._generation = 0
        # Bounded by the slots: a submit and a cancel for each, beside pings and credits.
        self._outbox: deque[Outgoing] = deque()
        self._outbox_filled = asyncio.Event()
        self._consumed = 0
        self._last_heard = 0.0

    @property
    def ready(self) -> bool:
        """Whether it can be given sequences."""
        return self.hello is not None and not self._draining

    @property
    def has_room(self) -> bool:
        """Whether it can be given another sequence now."""
        return self.ready and bool(self._free_slots)

    @property
    def running(self) -> int:
        """Sequences on the worker."""
        return len(self._running)

    @property
    def capacity(self) -> int:
        """Most sequences that the worker takes; 0 while it is not connected."""
        return self.hello.max_slots if self.hello else 0

    @property
    def held_tokens(self) -> int:
        """Tokens of all its sequences: what its next steps have to read."""
        return sum(len(entry.choice.request.prompt) + entry.choice.num_emitted for entry in self._running.values())

    # ---- to the worker ----

    def submit(self, choice: Choice) -> None:
        """Gives the worker a sequence. ``has_room`` must be true."""
        slot = self._free_slots.pop()
        self._generation += 1
        self._running[slot] = _Running(choice, self._generation)
        self._slot_of[choice] = slot
        request, parameters = choice.request, choice.request.parameters
        submit = worker_pb2.Submit(
            slot=slot,
            generation=self._generation,
            request_id=request.request_id,
            prompt_token_ids=request.prompt.tobytes(),
            sampling=sampling_pb2.SamplingParams(
                temperature=parameters.temperature,
                top_p=parameters.top_p,
                top_k=parameters.top_k,
                min_p=parameters.min_p,
                seed=(parameters.seed + choice.index) % 2**64,
            ),
            max_tokens=parameters.max_tokens,
            stop_token_ids=parameters.stop_token_ids,
            cache_salt=request.cache_salt,
        )
        if request.deadline is not None:
            submit.time_left_ms = max(0, int((request.deadline - time.monotonic()) * 1000))
        self._send(Outgoing(submit=submit))

    def cancel(self, choice: Choice) -> None:
        """Ends a sequence; its slot is free once the worker says so. Does nothing when it is not here."""
        slot = self._slot_of.get(choice)
        if slot is None:
            return
        entry = self._running[slot]
        if not entry.cancelled:
            entry.cancelled = True
            self._send(Outgoing(cancel=worker_pb2.CancelSlot(slot=slot, generation=entry.generation)))

    def _send(self, message: Outgoing) -> None:
        self._outbox.append(message)
        self._outbox_filled.set()

    # ---- the connection ----

    async def run(self) -> None:
        """Connects, serves, and connects again, until cancelled."""
        backoff = _FIRST_BACKOFF
        reported = ""
        while True:
            try:
                async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
                    await self._serve(worker_pb2_grpc.WorkerStub(channel).Connect())
            except (LinkBroken, ProtocolError, grpc.aio.AioRpcError) as error:
                reason = error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else str(error)
                was_ready = self.hello is not None
                self._lose(reason)
                if was_ready or reason != reported:
                    logger.warning("worker %s is not connected: %s", self.address, reason)
                    reported = reason
                backoff = _FIRST_BACKOFF if was_ready else min(backoff * 2, _LONGEST_BACKOFF)
            finally:
                self._lose("the router is shutting down")
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _serve(self, call: Any) -> None:
        """One stream, from Hello to its end. Raises what ended it."""
        async with asyncio.timeout(self._silence):
            message = await call.read()
        if message is grpc.aio.EOF:
            await self._raise_end(call)
        self._begin(message.hello if message.HasField("hello") else None)
        async with asyncio.TaskGroup() as tasks:
            # A task that raises ends the others.
            tasks.create_task(self._read(call))
            tasks.create_task(self._write(call))
            tasks.create_task(self._ping())

    def _begin(self, hello: worker_pb2.Hello | None) -> None:
        if hello is None:
            raise ProtocolError("the stream did not begin with Hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise LinkBroken(f"it speaks protocol {hello.protocol_version}, this router {PROTOCOL_VERSION}")
        refusal = self._accepts(hello)
        if refusal is not None:
            raise LinkBroken(refusal)
        self.hello = hello
        self._draining = False
        self._free_slots = list(range(hello.max_slots - 1, -1, -1))
        self._outbox.clear()
        self._consumed = 0
        self._last_heard = time.monotonic()
        self._send(Outgoing(credit=worker_pb2.Credit(step_batches=CREDIT_WINDOW)))
        logger.info(
            "worker %s is ready: %s, %d blocks of %d tokens, %d sequences",
            self.address, hello.model, hello.num_blocks, hello.block_size, hello.max_num_seqs,
        )  # fmt: skip
        self._on_change()

    def _lose(self, reason: str) -> None:
        """Forgets the connection; what ran on it fails."""
        if self.hello is None:
            return
        self.hello = None
        lost = list(self._slot_of)
        self._running.clear()
        self._slot_of.clear()
        self._free_slots = []
        for choice in lost:
            choice.request.fail(Unavailable("the worker that ran this request was lost; send the request again"))
        if lost:
            logger.warning("%d sequences were lost with worker %s: %s", len(lost), self.address, reason)
        self._on_change()

    async def _raise_end(self, call: Any) -> None:
        status = await call.code()
        raise LinkBroken((await call.details()) or f"the worker ended the stream ({status.name})")

    async def _read(self, call: Any) -> None:
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                await self._raise_end(call)
            self._last_heard = time.monotonic()
            match message.WhichOneof("message"):
                case "step_batch":
                    self._on_step_batch(message.step_batch)
                case "rejected":
                    self._on_rejected(message.rejected)
                case "pong":
                    self.load = message.pong.load

    async def _write(self, call: Any) -> None:
        while True:
            while self._outbox:
                await call.write(self._outbox.popleft())
            self._outbox_filled.clear()
            await self._outbox_filled.wait()

    async def _ping(self) -> None:
        nonce = 0
        while True:
            nonce += 1
            self._send(Outgoing(ping=worker_pb2.Ping(nonce=nonce)))
            await asyncio.sleep(min(PING_INTERVAL, self._silence / 3))
            silent = time.monotonic() - self._last_heard
            if silent > self._silence:
                raise LinkBroken(f"it has not answered for {silent:.1f} s")

    # ---- from the worker ----

    def _on_step_batch(self, batch: worker_pb2.StepBatch) -> None:
        running = self._running
        token_ids = list(batch.token_ids)
        offset = 0
        rows = zip(batch.slots, batch.generations, batch.first_indices, batch.counts, strict=True)
        for admitted in batch.admitted:
            entry = running.get(admitted.slot)
            if entry is not None and entry.generation == admitted.generation:
                entry.choice.cached_tokens = admitted.cached_tokens
        for slot, generation, first_index, count in rows:
            entry = running.get(slot)
            if entry is not None and entry.generation == generation:
                entry.choice.accept(first_index, token_ids[offset : offset + count])
                if entry.choice.stop_string is not None:
                    self.cancel(entry.choice)
            offset += count
        for finished in batch.finished:
            self._on_finished(finished)
        self.load = batch.load
        self._consumed += 1
        if self._consumed >= CREDIT_WINDOW // 4:
            self._send(Outgoing(credit=worker_pb2.Credit(step_batches=self._consumed)))
            self._consumed = 0
        if batch.finished:
            self._on_change()

    def _on_finished(self, finished: worker_pb2.FinishedSlot) -> None:
        choice = self._release(finished.slot, finished.generation)
        if choice is None:
            return
        match finished.reason:
            case sampling_pb2.FINISH_REASON_STOP | sampling_pb2.FINISH_REASON_LENGTH:
                stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
                choice.finish(finished.reason, stop_token_id)
            case sampling_pb2.FINISH_REASON_CANCELLED:
                pass  # we asked for it and the request knows
            case sampling_pb2.FINISH_REASON_DEADLINE:
                choice.request.fail(DeadlineExceeded("the deadline passed while the request ran"))
            case _:
                self._fail(choice.request.fail, f"worker {self.address} reports: {finished.error}")

    def _on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        choice = self._release(rejected.slot, rejected.generation)
        if rejected.reason == worker_pb2.Rejected.REASON_DRAINING:
            self._draining = True
        if choice is None:
            return
        if rejected.reason == worker_pb2.Rejected.REASON_INVALID:
            logger.error("worker %s refused request %s: %s", self.address, choice.request.request_id, rejected.message)
            choice.request.fail(InvalidRequest("prompt", rejected.message))
        else:
            self._requeue(choice)
        self._on_change()

    def _release(self, slot: int, generation: int) -> Choice | None:
        """Frees a slot and returns the choice that had it; None when it was another generation's."""
        entry = self._running.get(slot)
        if entry is None or entry.generation != generation:
            return None
        del self._running[slot]
        del self._slot_of[entry.choice]
        self._free_slots.append(slot)
        return entry.choice

    def _fail(self, fail: Callable[[RequestError], None], what: str) -> None:
        error = InternalError()
        logger.error("%s: %s", error.id, what)
        fail(error)

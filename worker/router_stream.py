"""The worker's end of one router's stream: slots, credits, and what is pending for the next message."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass

from protos import worker_pb2
from worker.engine import EngineLimits
from worker.grammar import Constraint
from worker.kv_event_feed import MAX_NAMES, KvEventFeed
from worker.prefix_changes import PrefixChanges
from worker.sequence import Sequence, TokenLogprobs
from worker.sequence_trace import SequenceTracer
from worker.wire import REASONS, InvalidSubmit, constraint_of, logprobs_message, sequence_of, usage_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot in one generation."""

    number: int
    generation: int


class RouterStream:
    """One Connect call.

    What the engine produces is merged per slot until the router has given credit and the transport is free, so memory
    is bounded by what the running sequences may generate.

    Args:
        limits: the engine's limits.
        max_slots: sequences that this stream may have at once.
        epoch: the worker's.
        submit, cancel: hand a sequence, and what its output must be, to the engine, or end it there; ``submit`` returns
            why it cannot, if it cannot.
        subscribe: has ``prefix_snapshot`` called, and ``prefix_changed`` from there on.
        pong: what a Pong says of the engine.
        tracer: records what becomes of sequences whose routers want to know.
    """

    def __init__(
        self,
        limits: EngineLimits,
        max_slots: int,
        epoch: int,
        submit: Callable[["RouterStream", Sequence, Constraint | None], "worker_pb2.Rejected.Reason | None"],
        cancel: Callable[[Sequence], None],
        subscribe: Callable[["RouterStream"], None],
        pong: Callable[[], worker_pb2.Pong],
        tracer: SequenceTracer,
    ) -> None:
        self._limits = limits
        self._max_slots = max_slots
        self._submit_to_engine = submit
        self._cancel_in_engine = cancel
        self._subscribe = subscribe
        self._pong = pong
        self._tracer = tracer
        self._sequences: dict[Slot, Sequence] = {}
        self._slots: dict[Sequence, Slot] = {}
        self._newest_generation: dict[int, int] = {}
        self._credit = 0
        self._replies: deque[worker_pb2.WorkerMessage] = deque()
        self._rows: dict[Slot, tuple[int, list[int]]] = {}
        self._logprobs: list[worker_pb2.RowLogprobs] = []
        self._prompt_logprobs: list[worker_pb2.RowLogprobs] = []
        self._admitted: list[worker_pb2.Admitted] = []
        self._finished: list[worker_pb2.FinishedSlot] = []
        self._kv_events = KvEventFeed(epoch, MAX_NAMES)
        self._step = 0
        self._load = worker_pb2.Load()
        # Prompts were computed since the last StepBatch: the router sees how far they are, though none has a token yet.
        self._has_progress = False
        self._closing = False
        self._wake = asyncio.Event()

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that have not ended."""
        return list(self._slots)

    # ---- from the router ----

    async def read(self, messages: AsyncIterable[worker_pb2.RouterMessage]) -> None:
        """Obeys the router's messages until it closes the stream."""
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    self._on_submit(message.submit)
                case "cancel":
                    seq = self._sequences.get(Slot(message.cancel.slot, message.cancel.generation))
                    if seq is not None:
                        self._cancel_in_engine(seq)
                case "credit":
                    self._credit += message.credit.step_batches
                    self._wake.set()
                case "ping":
                    self.send_pong(message.ping.nonce)
                case "subscribe_kv_events":
                    if self._kv_events.ask():
                        self._subscribe(self)
                case other:
                    logger.warning("router sent a message that this version does not know: %s", other)
        self.close()

    def _on_submit(self, submit: worker_pb2.Submit) -> None:
        slot = Slot(submit.slot, submit.generation)
        try:
            seq = self._sequence(submit)
        except InvalidSubmit as error:
            self._reject(slot, worker_pb2.Rejected.REASON_INVALID, str(error))
            return
        refusal = self._submit_to_engine(self, seq, constraint_of(submit.sampling))
        if refusal is not None:
            self._reject(slot, refusal, "")
            return
        self._newest_generation[slot.number] = slot.generation
        self._sequences[slot] = seq
        self._slots[seq] = slot
        self._tracer.submitted(seq, submit.traceparent)

    def _sequence(self, submit: worker_pb2.Submit) -> Sequence:
        """Checks a Submit and makes its sequence. The router has checked the same; the engine must not depend on it."""
        if submit.slot >= self._max_slots:
            raise InvalidSubmit(f"slot is {submit.slot}; this stream has {self._max_slots}")
        if submit.generation <= self._newest_generation.get(submit.slot, -1):
            raise InvalidSubmit(f"generation {submit.generation} of slot {submit.slot} is not new")
        if any(slot.number == submit.slot for slot in self._sequences):
            raise InvalidSubmit(f"slot {submit.slot} is in use")
        return sequence_of(submit, self._limits)

    def _reject(self, slot: Slot, reason: "worker_pb2.Rejected.Reason", message: str, field: str = "") -> None:
        rejected = worker_pb2.Rejected(
            slot=slot.number, generation=slot.generation, reason=reason, message=message, field=field
        )
        self._reply(worker_pb2.WorkerMessage(rejected=rejected))

    def send_pong(self, nonce: int = 0) -> None:
        """Says how the engine is, in answer to a Ping or by itself."""
        pong = self._pong()
        pong.nonce = nonce
        pong.load.CopyFrom(self._load)
        self._reply(worker_pb2.WorkerMessage(pong=pong))

    def _reply(self, message: worker_pb2.WorkerMessage) -> None:
        self._replies.append(message)
        self._wake.set()

    # ---- from the engine ----

    def refuse(self, seq: Sequence, field: str, message: str) -> None:
        """A field of the sequence's Submit turned out wrong before it ran."""
        slot = self._slots.pop(seq)
        del self._sequences[slot]
        self._tracer.refused(seq)
        self._reject(slot, worker_pb2.Rejected.REASON_INVALID, message, field)

    def admitted(self, seq: Sequence) -> None:
        """The sequence began to run."""
        slot = self._slots.get(seq)
        if slot is not None:
            self._tracer.admitted(seq)
            self._admitted.append(
                worker_pb2.Admitted(
                    slot=slot.number, generation=slot.generation, cached_tokens=seq.num_cached_tokens or 0
                )
            )

    def tokens(self, seq: Sequence, first_index: int, token_ids: list[int]) -> None:
        """The sequence got tokens."""
        slot = self._slots.get(seq)
        if slot is not None:
            self._tracer.got_tokens(seq)
            self._rows.setdefault(slot, (first_index, []))[1].extend(token_ids)

    def logprobs(self, seq: Sequence, first_index: int, rows: list[TokenLogprobs], of_prompt: bool) -> None:
        """Log-probabilities of consecutive output or prompt tokens."""
        slot = self._slots.get(seq)
        if slot is not None:
            (self._prompt_logprobs if of_prompt else self._logprobs).append(
                worker_pb2.RowLogprobs(
                    slot=slot.number,
                    generation=slot.generation,
                    first_index=first_index,
                    logprobs=logprobs_message(rows),
                )
            )

    def finished(self, seq: Sequence, error: str = "", field: str = "") -> None:
        """The sequence ended; for ERROR, with what went wrong and which field of the request is to blame, if one is."""
        self._tracer.finished(seq)
        slot = self._slots.pop(seq, None)
        if slot is None:
            return
        del self._sequences[slot]
        assert seq.finish_reason is not None
        row = worker_pb2.FinishedSlot(
            slot=slot.number,
            generation=slot.generation,
            reason=REASONS[seq.finish_reason],
            usage=usage_of(seq),
            error=error,
            field=field,
        )
        if seq.stop_token_id is not None:
            row.stop_token_id = seq.stop_token_id
        self._finished.append(row)

    def prefix_snapshot(self, names: list[bytes]) -> None:
        """All names that the prefix cache knows."""
        self._kv_events.restart(names)
        self._wake.set()

    def prefix_changed(self, changes: PrefixChanges) -> None:
        """What changed in the prefix cache since the last call."""
        self._kv_events.add(changes)
        self._wake.set()

    def step_ended(self, step: int, load: worker_pb2.Load) -> None:
        """All that a step produced was handed over; what is pending may go out."""
        self._step = step
        self._has_progress |= bool(self._sequences) and load.prefill_tokens != self._load.prefill_tokens
        self._load = load
        self._wake.set()

    # ---- to the router ----

    def close(self) -> None:
        """Ends the stream after what can still be sent."""
        self._closing = True
        self._wake.set()

    async def outgoing(self) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """Messages for the router, each built when the transport is ready for it."""
        while True:
            while self._replies:
                yield self._replies.popleft()
            if self._credit and (self._rows or self._admitted or self._finished or self._has_progress):
                self._credit -= 1
                yield worker_pb2.WorkerMessage(step_batch=self._take_batch())
                continue
            if self._credit and self._kv_events.has_pending:
                self._credit -= 1
                yield worker_pb2.WorkerMessage(kv_events=self._kv_events.take())
                continue
            if self._closing:
                return
            self._wake.clear()
            await self._wake.wait()

    def _take_batch(self) -> worker_pb2.StepBatch:
        rows = self._rows
        batch = worker_pb2.StepBatch(
            step=self._step,
            slots=[slot.number for slot in rows],
            generations=[slot.generation for slot in rows],
            first_indices=[first for first, _ in rows.values()],
            counts=[len(ids) for _, ids in rows.values()],
            token_ids=[token_id for _, ids in rows.values() for token_id in ids],
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            admitted=self._admitted,
            finished=self._finished,
            load=self._load,
        )
        self._rows, self._logprobs, self._prompt_logprobs, self._admitted, self._finished = {}, [], [], [], []
        self._has_progress = False
        return batch

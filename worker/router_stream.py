"""The worker's end of one router's stream: slots, credits, and what is pending for the next message."""

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass

import numpy as np

from protos import sampling_pb2, worker_pb2
from protos.prefix import chain_root
from worker.engine import EngineLimits
from worker.grammar import Constraint
from worker.kv_event_feed import MAX_NAMES, KvEventFeed
from worker.prefix_changes import PrefixChanges
from worker.sequence import FinishReason, SamplingParams, Sequence, TokenLogprobs, token_array

logger = logging.getLogger(__name__)

_REASONS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: sampling_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: sampling_pb2.FINISH_REASON_DEADLINE,
    FinishReason.ERROR: sampling_pb2.FINISH_REASON_ERROR,
}


# Alternatives of a token that may be asked for.
MAX_LOGPROBS = 20


class InvalidSubmit(ValueError):
    """A field of a Submit is out of range."""


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
        describe_step: (steps ended, seconds of the running step), for Pong.
    """

    def __init__(
        self,
        limits: EngineLimits,
        max_slots: int,
        epoch: int,
        submit: Callable[["RouterStream", Sequence, Constraint | None], "worker_pb2.Rejected.Reason | None"],
        cancel: Callable[[Sequence], None],
        subscribe: Callable[["RouterStream"], None],
        describe_step: Callable[[], tuple[int, float]],
    ) -> None:
        self._limits = limits
        self._max_slots = max_slots
        self._submit_to_engine = submit
        self._cancel_in_engine = cancel
        self._subscribe = subscribe
        self._describe_step = describe_step
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
                    self._reply(worker_pb2.WorkerMessage(pong=self._pong(message.ping.nonce)))
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
        refusal = self._submit_to_engine(self, seq, _constraint(submit.sampling))
        if refusal is not None:
            self._reject(slot, refusal, "")
            return
        self._newest_generation[slot.number] = slot.generation
        self._sequences[slot] = seq
        self._slots[seq] = slot

    def _sequence(self, submit: worker_pb2.Submit) -> Sequence:
        """Checks a Submit and makes its sequence. The router has checked the same; the engine must not depend on it."""
        if submit.slot >= self._max_slots:
            raise InvalidSubmit(f"slot is {submit.slot}; this stream has {self._max_slots}")
        if submit.generation <= self._newest_generation.get(submit.slot, -1):
            raise InvalidSubmit(f"generation {submit.generation} of slot {submit.slot} is not new")
        if any(slot.number == submit.slot for slot in self._sequences):
            raise InvalidSubmit(f"slot {submit.slot} is in use")
        prompt = submit.prompt_token_ids
        if not prompt or len(prompt) % 4:
            raise InvalidSubmit(f"prompt_token_ids has {len(prompt)} bytes; wanted four for each of at least one token")
        length = len(prompt) // 4
        largest = int(np.frombuffer(prompt, dtype="<u4").max())
        if largest >= self._limits.vocab_size:
            raise InvalidSubmit(f"prompt has token id {largest}; the vocabulary has {self._limits.vocab_size}")
        if not submit.num_emitted < submit.max_tokens:
            raise InvalidSubmit(
                f"max_tokens is {submit.max_tokens}; wanted more than num_emitted, {submit.num_emitted}"
            )
        if submit.num_emitted >= length:
            raise InvalidSubmit(f"num_emitted is {submit.num_emitted} of a prompt of {length} tokens")
        longest = length - submit.num_emitted + submit.max_tokens
        if longest > self._limits.max_model_len:
            raise InvalidSubmit(f"prompt and max_tokens need {longest} tokens of {self._limits.max_model_len}")
        if submit.priority and not self._limits.takes_priorities:
            raise InvalidSubmit(f"priority is {submit.priority}; this worker runs with --scheduling-policy fcfs")
        deadline = time.monotonic() + submit.time_left_ms / 1000 if submit.HasField("time_left_ms") else None
        return Sequence(
            request_id=submit.request_id,
            tokens=token_array(prompt),
            sampling=_sampling(submit, self._limits.vocab_size),
            max_tokens=submit.max_tokens,
            stop_token_ids=frozenset(submit.stop_token_ids),
            num_emitted=submit.num_emitted,
            cache_root=chain_root(submit.cache_salt),
            deadline=deadline,
            priority=submit.priority,
            skip_reading_prefix_cache=submit.skip_reading_prefix_cache,
        )

    def _reject(self, slot: Slot, reason: "worker_pb2.Rejected.Reason", message: str, field: str = "") -> None:
        rejected = worker_pb2.Rejected(
            slot=slot.number, generation=slot.generation, reason=reason, message=message, field=field
        )
        self._reply(worker_pb2.WorkerMessage(rejected=rejected))

    def _pong(self, nonce: int) -> worker_pb2.Pong:
        step, age = self._describe_step()
        return worker_pb2.Pong(nonce=nonce, step=step, step_age_ms=int(age * 1000), load=self._load)

    def _reply(self, message: worker_pb2.WorkerMessage) -> None:
        self._replies.append(message)
        self._wake.set()

    # ---- from the engine ----

    def refuse(self, seq: Sequence, field: str, message: str) -> None:
        """A field of the sequence's Submit turned out wrong before it ran."""
        slot = self._slots.pop(seq)
        del self._sequences[slot]
        self._reject(slot, worker_pb2.Rejected.REASON_INVALID, message, field)

    def admitted(self, seq: Sequence) -> None:
        """The sequence began to run."""
        slot = self._slots.get(seq)
        if slot is not None:
            self._admitted.append(
                worker_pb2.Admitted(
                    slot=slot.number, generation=slot.generation, cached_tokens=seq.num_cached_tokens or 0
                )
            )

    def tokens(self, seq: Sequence, first_index: int, token_ids: list[int]) -> None:
        """The sequence got tokens."""
        slot = self._slots.get(seq)
        if slot is not None:
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
                    logprobs=sampling_pb2.Logprobs(
                        logprobs=[row.logprob for row in rows],
                        top_count=len(rows[0].top_ids),
                        top_token_ids=[token_id for row in rows for token_id in row.top_ids],
                        top_logprobs=[logprob for row in rows for logprob in row.top_logprobs],
                    ),
                )
            )

    def finished(self, seq: Sequence, error: str = "", field: str = "") -> None:
        """The sequence ended; for ERROR, with what went wrong and which field of the request is to blame, if one is."""
        slot = self._slots.pop(seq, None)
        if slot is None:
            return
        del self._sequences[slot]
        assert seq.finish_reason is not None
        row = worker_pb2.FinishedSlot(
            slot=slot.number,
            generation=slot.generation,
            reason=_REASONS[seq.finish_reason],
            usage=sampling_pb2.Usage(
                prompt_tokens=seq.num_prompt_tokens - seq.num_emitted,
                completion_tokens=seq.num_output,
                cached_tokens=seq.num_cached_tokens or 0,
            ),
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
            if self._credit and (self._rows or self._admitted or self._finished):
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
        return batch


def _constraint(sampling: sampling_pb2.SamplingParams) -> Constraint | None:
    """What the output must be, if anything."""
    kind = sampling.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "json_object":
        return Constraint(kind)
    if kind == "choices":
        return Constraint(kind, json.dumps(list(sampling.choices.texts)))
    return Constraint(kind, getattr(sampling, kind))


def _sampling(submit: worker_pb2.Submit, vocab_size: int) -> SamplingParams:
    wire = submit.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        if not wire.HasField(name):
            raise InvalidSubmit(f"sampling.{name} is missing; the router resolves every default")
    params = SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        seed=wire.seed,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty if wire.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(wire.logit_bias.items()),
        allowed_token_ids=tuple(dict.fromkeys(wire.allowed_token_ids)),
        bad_words=tuple(tuple(word.token_ids) for word in submit.bad_words),
        min_tokens=submit.min_tokens,
        logprobs=submit.logprobs if submit.HasField("logprobs") else None,
        prompt_logprobs=submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None,
    )
    ranges = {
        "temperature": (0, 100),
        "top_p": (math.ulp(0.0), 1),
        "min_p": (0, 1),
        "presence_penalty": (-100, 100),
        "frequency_penalty": (-100, 100),
        "repetition_penalty": (1e-2, 1e2),
    }
    for name, (low, high) in ranges.items():
        value = getattr(params, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidSubmit(f"sampling.{name} is {value}; wanted {low} to {high}")
    if not all(math.isfinite(value) for _, value in params.logit_bias):
        raise InvalidSubmit("sampling.logit_bias has a value that is not finite")
    if not all(params.bad_words):
        raise InvalidSubmit("bad_words has an empty word")
    named = [token for token, _ in params.logit_bias] + list(params.allowed_token_ids)
    named += [token for word in params.bad_words for token in word] + list(submit.stop_token_ids)
    if any(token >= vocab_size for token in named):
        raise InvalidSubmit(f"a field names token {max(named)}; the vocabulary has {vocab_size}")
    for top_count in (params.logprobs, params.prompt_logprobs):
        if top_count is not None and top_count > min(MAX_LOGPROBS, vocab_size):
            raise InvalidSubmit(f"{top_count} alternatives are more than {min(MAX_LOGPROBS, vocab_size)}")
    return params

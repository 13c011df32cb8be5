"""Serves the Worker service: hands sequences from routers to the engine, and what it produces back to their streams."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import grpc
from grpc.aio import ServicerContext

from protos import worker_pb2, worker_pb2_grpc
from protos.channel import LOADING
from protos.tracing import Tracing
from worker.engine import Engine, EngineLimits
from worker.engine_loop import EngineLoop
from worker.grammar import Constraint, GrammarCompiler, GrammarError
from worker.prefix_changes import PrefixChanges
from worker.router_stream import RouterStream
from worker.sequence import FinishReason, Sequence, SequenceStatus
from worker.sequence_trace import SequenceTracer
from worker.step_plan import StepOutput
from worker.wire import blamed_field

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 2
# How long a stream waits for a model that is still loaded before it is refused.
LOADING_WAIT_S = 1.0


@dataclass(frozen=True)
class Serving:
    """What there is once the model is loaded."""

    loop: EngineLoop
    limits: EngineLimits
    max_slots: int
    grammars: GrammarCompiler
    start_seconds: Mapping[str, float]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """All routers' streams over one engine. Refuses streams until ``start`` was given the engine.

    Args:
        worker_id: name in logs and routing.
        tracing: records what becomes of sequences.
    """

    def __init__(self, worker_id: str, tracing: Tracing | None = None) -> None:
        self._worker_id = worker_id
        self._tracer = SequenceTracer(tracing or Tracing(), worker_id)
        self._epoch = secrets.randbits(63) | 1
        self._serving: Serving | None = None
        self._started = asyncio.Event()
        self._streams: set[RouterStream] = set()
        self._subscribers: set[RouterStream] = set()
        self._owners: dict[Sequence, RouterStream] = {}
        self._compiling: dict[Sequence, asyncio.Task[None]] = {}
        self._load = worker_pb2.Load()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.failed = asyncio.Event()

    def start(
        self,
        engine: Engine,
        limits: EngineLimits,
        grammars: GrammarCompiler,
        start_seconds: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Starts the engine's thread and accepts streams from here on; routers are told ``start_seconds``, by phase."""
        # As many more than can run as end in a step, about, so that they are followed at once; what else waits is
        # better off with the router, which may yet find another worker.
        max_slots = limits.max_num_seqs + max(1, limits.max_num_seqs // 16)
        loop = EngineLoop(engine, self._on_output, self._on_prefix_changes, self._on_failure)
        self._load = loop.start()
        self._serving = Serving(loop, limits, max_slots, grammars, start_seconds)
        self._started.set()

    async def drain(self, grace: float) -> None:
        """Refuses new sequences, gives running ones ``grace`` seconds, then ends all streams and the engine."""
        self._draining = True
        for stream in self._streams:
            stream.send_pong()
        try:
            await asyncio.wait_for(self._idle.wait(), grace)
        except TimeoutError:
            logger.warning("%d sequences still ran after %g s and were cut off", len(self._owners), grace)
        for stream in self._streams:
            stream.close()
        if self._serving is not None:
            self._serving.grammars.close()
            await asyncio.to_thread(self._serving.loop.stop, 1.0 if self.failed.is_set() else 5.0)

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: "ServicerContext[Any, Any]"
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """One router's stream, from Hello to its end; what it left running is cancelled then."""
        if self._serving is None:
            # Who is there already when the model is loaded is let in at once.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._started.wait(), LOADING_WAIT_S)
        serving = self._serving
        if serving is None or self._draining:
            state = "shutting down" if self._draining else "still loading its model"
            told = () if self._draining else LOADING
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"worker {self._worker_id} is {state}", told)
            raise AssertionError("abort raises")
        stream = RouterStream(
            serving.limits,
            serving.max_slots,
            self._epoch,
            self._submit,
            self._cancel,
            self._subscribe,
            partial(self._pong, serving),
            self._tracer,
        )
        stream.step_ended(serving.loop.step, self._load)
        self._streams.add(stream)
        peer = context.peer()  # once the call is gone, asking for it ends the process by a segmentation fault
        logger.info("router %s connected", peer)
        reader = asyncio.create_task(stream.read(request_iterator))
        reader.add_done_callback(lambda task: stream.close())
        try:
            yield worker_pb2.WorkerMessage(hello=self._hello(serving))
            async for message in stream.outgoing():
                yield message
        finally:
            reader.cancel()
            self._streams.discard(stream)
            self._unsubscribe(stream)
            for seq in stream.sequences:
                self._cancel(seq)
            logger.info("router %s disconnected, %d sequences cancelled", peer, len(stream.sequences))

    def _hello(self, serving: "Serving") -> worker_pb2.Hello:
        limits = serving.limits
        return worker_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self._worker_id,
            epoch=self._epoch,
            model=limits.model,
            manifest_hash=limits.manifest_hash,
            vocab_size=limits.vocab_size,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_slots=serving.max_slots,
            takes_priorities=limits.takes_priorities,
            enable_prefix_caching=limits.enable_prefix_caching,
            start_seconds=serving.start_seconds,
        )

    def _pong(self, serving: Serving) -> worker_pb2.Pong:
        """How the engine is, but for its load."""
        clock = serving.loop.clock
        return worker_pb2.Pong(
            step=serving.loop.step,
            step_age_ms=int(clock.age * 1000),
            draining=self._draining,
            step_time_us=int(clock.typical * 1e6),
            longest_step_us=int(clock.longest * 1e6),
        )

    def _submit(
        self, stream: RouterStream, seq: Sequence, constraint: Constraint | None
    ) -> "worker_pb2.Rejected.Reason | None":
        serving = self._serving
        if serving is None or self._draining or self.failed.is_set():
            return worker_pb2.Rejected.REASON_DRAINING
        if len(self._owners) >= serving.max_slots:
            return worker_pb2.Rejected.REASON_FULL
        self._owners[seq] = stream
        self._idle.clear()
        if constraint is None:
            serving.loop.add(seq)
        else:
            self._compiling[seq] = asyncio.create_task(self._add_constrained(serving, seq, constraint))
        return None

    async def _add_constrained(self, serving: Serving, seq: Sequence, constraint: Constraint) -> None:
        """Adds a sequence once its grammar is compiled; refuses it when that cannot be done."""
        try:
            seq.automaton = await serving.grammars.automaton(constraint, seq.tokens[seq.output_start :])
        except GrammarError as error:
            self._disown(seq).refuse(seq, error.field, str(error))
        else:
            serving.loop.add(seq)
        finally:
            del self._compiling[seq]

    def _cancel(self, seq: Sequence) -> None:
        """Ends a sequence, in the engine or on its way there."""
        assert self._serving is not None
        task = self._compiling.get(seq)
        if task is None:
            self._serving.loop.cancel(seq)
            return
        task.cancel()
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = FinishReason.CANCELLED
        stream = self._disown(seq)
        stream.finished(seq)
        stream.step_ended(self._serving.loop.step, self._load)

    def _subscribe(self, stream: RouterStream) -> None:
        assert self._serving is not None
        self._subscribers.add(stream)
        self._serving.loop.watch_prefixes(stream.prefix_snapshot)

    def _unsubscribe(self, stream: RouterStream) -> None:
        if stream in self._subscribers and self._serving is not None:
            self._subscribers.discard(stream)
            if not self._subscribers:
                self._serving.loop.unwatch_prefixes()

    def _disown(self, seq: Sequence) -> RouterStream:
        """The sequence is no more; returns the stream that it came through."""
        stream = self._owners.pop(seq)
        if not self._owners:
            self._idle.set()
        return stream

    def _on_output(self, output: StepOutput, load: worker_pb2.Load) -> None:
        if self.failed.is_set():
            return
        for seq in output.admitted:
            self._owners[seq].admitted(seq)
        for seq, first_index, rows in output.prompt_logprobs:
            self._owners[seq].logprobs(seq, first_index, rows, of_prompt=True)
        for seq, first_index, rows in output.logprobs:
            self._owners[seq].logprobs(seq, first_index, rows, of_prompt=False)
        for seq, first_index, token_ids in output.tokens:
            self._owners[seq].tokens(seq, first_index, token_ids)
        for seq in output.finished:
            self._owners.pop(seq).finished(seq, seq.error, blamed_field(seq))
        self._load = load
        self._tracer.step_ended()
        for stream in self._streams:
            stream.step_ended(output.number, load)
        if not self._owners:
            self._idle.set()

    def _on_prefix_changes(self, changes: PrefixChanges) -> None:
        for stream in self._subscribers:
            stream.prefix_changed(changes)

    def _on_failure(self, error: BaseException) -> None:
        self.failed.set()
        for task in self._compiling.values():
            task.cancel()
        for seq, stream in self._owners.items():
            seq.status = SequenceStatus.FINISHED
            seq.finish_reason = FinishReason.ERROR
            stream.finished(seq, f"the worker's engine failed: {type(error).__name__}")
        self._owners.clear()
        for stream in self._streams:
            stream.step_ended(0, worker_pb2.Load())
        self._idle.set()

"""The router's end of one worker's stream: connects, again and again, and passes sequences up and tokens down.

Owns the stream's slots, credit and pings. Does not choose what runs where: that is the scheduler's.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable
from typing import Any, Protocol

import grpc
from grpc.aio import StreamStreamCall

from protos import worker_pb2, worker_pb2_grpc
from protos.channel import CHANNEL_OPTIONS
from router.errors import InvalidArgument, Unavailable
from router.request import Choice, OutOfStep
from router.slot_table import SlotTable
from router.submission import submission

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 2
# StepBatches that the worker may have under way.
CREDIT_WINDOW = 32
PING_INTERVAL_S = 1.0
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0
_MAX_TIME_LEFT_MS = 2**32 - 1
# Beside a Submit and a CancelSlot for each slot: Credit and Ping messages, of which few are ever under way.
_QUEUE_SPARE = 64

_OPTIONS = [
    *CHANNEL_OPTIONS,
    # Each attempt has a connection of its own: a half-dead one must not be taken up again.
    ("grpc.use_local_subchannel_pool", 1),
]

Call = StreamStreamCall[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]


class LinkLost(Exception):
    """The stream ended or cannot be trusted; the message is for the log."""


class LinkListener(Protocol):
    """Who wants to know what becomes of links; called from the event loop."""

    def readiness_changed(self) -> None:
        """A link became ready, or is not any more."""

    def capacity_changed(self) -> None:
        """A link can take a sequence that it could not take before."""

    def put_back(self, choice: Choice) -> None:
        """A worker refused a choice for now; it must wait for its turn again."""


class WorkerLink:
    """One worker, by its address.

    Args:
        address: host:port.
        worker_timeout: seconds without a Pong after which the worker counts as lost.
        check: raises LinkLost when the worker does not belong to the fleet.
        listener: is told of changes.
    """

    def __init__(
        self,
        address: str,
        worker_timeout: float,
        check: Callable[["WorkerLink", worker_pb2.Hello], None],
        listener: LinkListener,
    ) -> None:
        self.address = address
        self.hello: worker_pb2.Hello | None = None
        self.slots = SlotTable(0)
        self._timeout = worker_timeout
        self._check = check
        self._listener = listener
        self._draining = False
        # The worker said so; until the next sign that something has changed there.
        self._full = False
        self._outgoing: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue(_QUEUE_SPARE)
        self._broken = asyncio.Event()
        self._credit_owed = 0
        self._silent_pings = 0
        self._last_loss = ""

    @property
    def name(self) -> str:
        """The worker's name for itself, once it is known."""
        return self.hello.worker_id if self.hello is not None else self.address

    @property
    def ready(self) -> bool:
        """Whether the worker is there and takes new sequences, if not at this moment."""
        return self.hello is not None and not self._draining

    @property
    def has_room(self) -> bool:
        """Whether ``submit`` is possible now."""
        return self.ready and not self._full and self.slots.has_free

    # ---- the stream's life ----

    async def run(self) -> None:
        """Keeps the stream up until cancelled."""
        backoff = FIRST_BACKOFF_S
        while True:
            try:
                await self._connect()
            except LinkLost as loss:
                if self.hello is not None:
                    backoff = FIRST_BACKOFF_S
                self._down(str(loss))
            except Exception:
                logger.exception("worker %s: its link failed and is made anew", self.address)
            finally:
                self._down("")
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, LAST_BACKOFF_S)

    async def _connect(self) -> None:
        """One stream, from its first message to its end. Raises LinkLost, always."""
        async with grpc.aio.insecure_channel(self.address, options=_OPTIONS) as channel:
            call: Call = worker_pb2_grpc.WorkerStub(channel).Connect()
            tasks: list[asyncio.Task[None]] = []
            try:
                self._up(await self._read_hello(call))
                tasks = [
                    asyncio.create_task(run(call), name=f"{run.__name__} {self.address}")
                    for run in (self._read, self._write, self._ping, self._wait_broken)
                ]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                call.cancel()

    async def _read_hello(self, call: Call) -> worker_pb2.Hello:
        try:
            async with asyncio.timeout(self._timeout):
                message = await _next(call)
        except TimeoutError:
            raise LinkLost(f"no Hello within {self._timeout:g} s") from None
        if message.WhichOneof("message") != "hello":
            raise LinkLost("its first message is not Hello")
        hello = message.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise LinkLost(f"it speaks protocol version {hello.protocol_version}, this router {PROTOCOL_VERSION}")
        if not hello.max_slots:
            raise LinkLost("it grants no slots")
        self._check(self, hello)
        return hello

    def _up(self, hello: worker_pb2.Hello) -> None:
        self.slots = SlotTable(hello.max_slots)
        self._outgoing = asyncio.Queue(2 * hello.max_slots + _QUEUE_SPARE)
        self._broken.clear()
        self._draining = self._full = False
        self._credit_owed = self._silent_pings = 0
        self._last_loss = ""
        self.hello = hello
        logger.info(
            "worker %s at %s is ready: model %s, %d slots, context %d, epoch %x",
            *(hello.worker_id, self.address, hello.model, hello.max_slots, hello.max_model_len, hello.epoch),
        )
        self._send(worker_pb2.RouterMessage(credit=worker_pb2.Credit(step_batches=CREDIT_WINDOW)))
        self._listener.readiness_changed()
        self._listener.capacity_changed()

    def _down(self, loss: str) -> None:
        """The stream is gone, and with it all that ran through it."""
        was_up, self.hello = self.hello is not None, None
        lost = list(self.slots.choices())
        self.slots = SlotTable(0)
        for choice in lost:
            choice.link = None
            choice.request.fail(Unavailable("the worker running this request was lost; send it again"))
        if was_up:
            self._listener.readiness_changed()
        if loss and loss != self._last_loss:  # a worker that is away for hours is worth one line
            logger.warning("worker %s: %s%s", self.address, loss, f"; {len(lost)} sequences lost" if was_up else "")
            self._last_loss = loss

    # ---- up ----

    def submit(self, choice: Choice, now: float) -> None:
        """Gives the worker a sequence; only when it ``has_room``. ``now`` is the loop's time."""
        request = choice.request
        choice.link = self
        choice.slot, generation = self.slots.bind(choice)
        submit = submission(choice)
        submit.slot, submit.generation = choice.slot, generation
        if request.deadline is not None:
            submit.time_left_ms = min(max(1, int((request.deadline - now) * 1000)), _MAX_TIME_LEFT_MS)
        self._send(worker_pb2.RouterMessage(submit=submit))

    def cancel(self, choice: Choice) -> None:
        """Ends a sequence whose choice nobody wants any more. Its slot is free once the worker says so."""
        choice.link = None
        self._cancel_slot(choice.slot)

    def _cancel_slot(self, slot: int) -> None:
        generation = self.slots.forget(slot)
        self._send(worker_pb2.RouterMessage(cancel=worker_pb2.CancelSlot(slot=slot, generation=generation)))

    def _send(self, message: worker_pb2.RouterMessage) -> None:
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:  # a worker that reads at all cannot let it come to this
            self._broken.set()

    async def _write(self, call: Call) -> None:
        while True:
            message = await self._outgoing.get()
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                # The reader knows why, and says it.
                await asyncio.sleep(self._timeout)
                raise LinkLost("its stream takes no more messages") from None

    async def _ping(self, call: Call) -> None:
        """Counts ticks instead of time: when this process itself was stopped, its workers are not to blame."""
        interval = min(PING_INTERVAL_S, self._timeout / 5)
        for nonce in itertools.count():
            if self._silent_pings * interval >= self._timeout:
                raise LinkLost(f"it did not answer for {self._timeout:g} s")
            self._silent_pings += 1
            self._send(worker_pb2.RouterMessage(ping=worker_pb2.Ping(nonce=nonce)))
            await asyncio.sleep(interval)

    async def _wait_broken(self, call: Call) -> None:
        await self._broken.wait()
        raise LinkLost("it does not read what it is sent")

    # ---- down ----

    async def _read(self, call: Call) -> None:
        while True:
            message = await _next(call)
            try:
                self._obey(message)
            except OutOfStep as error:
                raise LinkLost(f"its messages do not fit together: {error}") from error

    def _obey(self, message: worker_pb2.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "step_batch":
                self._on_batch(message.step_batch)
            case "pong":
                self._silent_pings = 0
                self._not_full()
            case "rejected":
                self._on_rejected(message.rejected)
            case other:
                raise OutOfStep(f"{other} is unexpected here")

    def _on_batch(self, batch: worker_pb2.StepBatch) -> None:
        slots = self.slots
        for admitted in batch.admitted:
            choice = slots.find(admitted.slot, admitted.generation)
            if choice is not None:
                choice.cached_tokens = admitted.cached_tokens
                choice.request.begun.set()
        for report in batch.prompt_logprobs:
            choice = slots.find(report.slot, report.generation)
            if choice is not None:
                choice.request.prompt_logprobs.add(report.first_index, report.logprobs)
                choice.request.changed.set()
        for report in batch.logprobs:
            choice = slots.find(report.slot, report.generation)
            if choice is not None:
                choice.take_logprobs(report.first_index, report.logprobs)
        for slot in slots.deliver(batch):
            self._cancel_slot(slot)
        for row in batch.finished:
            choice = slots.find(row.slot, row.generation)
            if choice is not None:
                stop_token_id = row.stop_token_id if row.HasField("stop_token_id") else None
                choice.finish(row.usage, row.reason, stop_token_id, row.error, row.field)
                choice.link = None
            slots.free(row.slot, row.generation)
        self._credit_owed += 1
        if self._credit_owed >= CREDIT_WINDOW // 2:
            self._send(worker_pb2.RouterMessage(credit=worker_pb2.Credit(step_batches=self._credit_owed)))
            self._credit_owed = 0
        if batch.finished:
            self._full = False
            self._listener.capacity_changed()
        else:
            self._not_full()

    def _not_full(self) -> None:
        if self._full:
            self._full = False
            self._listener.capacity_changed()

    def _on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        choice = self.slots.find(rejected.slot, rejected.generation)
        self.slots.free(rejected.slot, rejected.generation)
        if rejected.reason == worker_pb2.Rejected.REASON_DRAINING:
            if not self._draining:
                self._draining = True
                logger.info("worker %s is shutting down", self.name)
                self._listener.readiness_changed()
        elif rejected.reason == worker_pb2.Rejected.REASON_FULL:
            self._full = True
        if choice is None:
            return
        choice.link = None
        if rejected.reason == worker_pb2.Rejected.REASON_INVALID:
            # A wrong field that it names is the client's affair; others should not have come so far.
            level = logging.INFO if rejected.field else logging.WARNING
            logger.log(level, "worker %s refused request %s: %s", self.name, choice.request.id, rejected.message)
            message = rejected.message if rejected.field else f"the worker refused the request: {rejected.message}"
            choice.request.fail(InvalidArgument(rejected.field, message))
        else:
            self._listener.put_back(choice)


async def _next(call: Call) -> worker_pb2.WorkerMessage:
    """The next message of a stream. Raises LinkLost at its end."""
    try:
        message: Any = await call.read()
    except grpc.aio.AioRpcError as error:
        raise LinkLost(f"{error.code().name}: {error.details()}") from None
    if message is grpc.aio.EOF:
        raise LinkLost("it closed the stream")
    received: worker_pb2.WorkerMessage = message
    return received

"""The router's end of one worker's stream: connects, again and again, and passes sequences up and tokens down.

Owns the stream's slots, credit and pings. Does not choose what runs where: that is the scheduler's.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc
from grpc.aio import StreamStreamCall

from protos import sampling_pb2, worker_pb2, worker_pb2_grpc
from protos.channel import CHANNEL_OPTIONS, LOADING, open_channel
from protos.tls import ClientTls, explain_failure
from router.circuit_breaker import CircuitBreaker
from router.errors import InvalidArgument
from router.heartbeat import Health, Heartbeat
from router.link_listener import LinkListener
from router.recovery import Recovery
from router.request import Choice
from router.slot_table import SlotTable
from router.submission import submission
from router.token_logprobs import OutOfStep
from router.worker_loss import Loss, WorkerLoss

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 2
# StepBatches that the worker may have under way.
CREDIT_WINDOW = 32
PING_INTERVAL_S = 0.25
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


# What gRPC says of a connection that is gone. All else is the worker's own answer.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# What grpc.aio says, as INTERNAL, when the connection broke while a message was written to it.
_BROKEN_WRITE = "Internal error from Core"
_GIVEN_UP = (sampling_pb2.FINISH_REASON_CANCELLED, sampling_pb2.FINISH_REASON_ERROR)


class LinkLost(Exception):
    """The stream ended or cannot be trusted; the message is for the log."""

    def __init__(self, message: str, loss: Loss = Loss.FAILED, *, loading: bool = False) -> None:
        super().__init__(message)
        self.loss = loss
        # The worker is there, and will take streams soon.
        self.loading = loading


class WorkerLink:
    """One worker, by its address.

    Args:
        address: host:port.
        tls: of its connections.
        worker_timeout: seconds without a Pong after which the worker counts as lost.
        check: raises LinkLost when the worker does not belong to the fleet.
        listener: is told of changes.
        recovery: takes what a lost worker ran.
        others_work: whether other workers do: the last one gets no rest, however often it fails.
    """

    def __init__(
        self,
        address: str,
        tls: ClientTls | None,
        worker_timeout: float,
        check: Callable[["WorkerLink", worker_pb2.Hello], None],
        listener: LinkListener,
        recovery: Recovery,
        others_work: Callable[["WorkerLink"], bool],
    ) -> None:
        self.address = address
        self._tls = tls
        self.hello: worker_pb2.Hello | None = None
        self.slots = SlotTable(0)
        self._timeout = worker_timeout
        self._check = check
        self._listener = listener
        self._recovery = recovery
        self._others_work = others_work
        self._breaker = CircuitBreaker()
        self._heartbeat = Heartbeat(worker_timeout)
        # What was found at the last tick, so that changes are noticed.
        self._had_room = False
        # The worker shuts down.
        self._draining = False
        # Nobody knows its address any more: the link ends when nothing runs through it.
        self.retired = False
        # The worker said so; until the next sign that something has changed there.
        self._full = False
        self._outgoing: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue(_QUEUE_SPARE)
        self._broken = asyncio.Event()
        self._credit_owed = 0
        self._last_loss = ""

    @property
    def name(self) -> str:
        """The worker's name for itself, once it is known."""
        return self.hello.worker_id if self.hello is not None else self.address

    @property
    def ready(self) -> bool:
        """Whether the worker is there and takes new sequences, if not at this moment."""
        return self.hello is not None and not self._draining and not self.retired

    @property
    def works(self) -> bool:
        """Whether the worker is ready and there is no doubt about it."""
        return self.ready and self._heartbeat.health is Health.ALIVE and not self._breaker.pause

    @property
    def accepting(self) -> bool:
        """Whether the worker takes new sequences, if not at this moment for want of room."""
        return (
            self.ready
            and self._heartbeat.health is Health.ALIVE
            and (self._breaker.admits(self.slots.running) or not self._others_work(self))
        )

    @property
    def has_room(self) -> bool:
        """Whether ``submit`` is possible now."""
        return self.accepting and self.has_place

    @property
    def has_place(self) -> bool:
        """Whether there is room for one more sequence, if the worker takes any."""
        return not self._full and self.slots.has_free

    def has_waiting(self, choice: Choice) -> bool:
        """Whether a choice that it was given waits there: every place in the worker's steps is taken."""
        if choice.running or self.hello is None:
            return False
        return sum(other.running for other in self.slots.choices()) >= self.hello.max_num_seqs

    def retire(self) -> None:
        """The worker is no longer one of ours: it gets nothing new, and ``run`` ends when it has no sequence left."""
        self.retired = True
        self._listener.readiness_changed()

    def recall(self) -> None:
        """Undoes ``retire``."""
        self.retired = False
        self._listener.readiness_changed()
        self._listener.capacity_changed()

    # ---- the stream's life ----

    async def run(self) -> None:
        """Keeps the stream up until cancelled or retired."""
        backoff = FIRST_BACKOFF_S
        while not self.retired:
            try:
                await self._connect()
            except LinkLost as lost:
                if self.hello is not None or lost.loading:
                    backoff = FIRST_BACKOFF_S
                level = logging.INFO if lost.loading else logging.WARNING
                self._down(explain_failure(str(lost), self._tls), lost.loss, level)
            except Exception:
                logger.exception("worker %s: its link failed and is made anew", self.address)
            finally:
                self._down("", Loss.FAILED)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, LAST_BACKOFF_S)

    async def _connect(self) -> None:
        """One stream, from its first message to its end. Raises LinkLost, always."""
        async with open_channel(self.address, _OPTIONS, self._tls) as channel:
            call: Call = worker_pb2_grpc.WorkerStub(channel).Connect()
            tasks: list[asyncio.Task[None]] = []
            try:
                self._up(await self._read_hello(call))
                tasks = [
                    asyncio.create_task(run(call), name=f"{run.__name__} {self.address}")
                    for run in (self._read, self._write, self._watch, self._wait_broken)
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
                message = await next_message(call)
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
        self._heartbeat = Heartbeat(self._timeout)
        self._credit_owed = 0
        self._last_loss = ""
        self.hello = hello
        logger.info(
            "worker %s at %s is ready: model %s, %d slots, context %d, epoch %x",
            *(hello.worker_id, self.address, hello.model, hello.max_slots, hello.max_model_len, hello.epoch),
        )
        self._send(worker_pb2.RouterMessage(credit=worker_pb2.Credit(step_batches=CREDIT_WINDOW)))
        self._recovery.worker_returned(self.address, hello.epoch)
        self._listener.joined(self)
        self._listener.readiness_changed()
        self._listener.capacity_changed()

    def _down(self, reason: str, loss: Loss, level: int = logging.WARNING) -> None:
        """The stream is gone; what ran through it goes on elsewhere, the oldest slots' choices first."""
        lost = list(self.slots.choices())
        waited = {choice for choice in lost if self.has_waiting(choice)}
        name = self.name
        hello, self.hello = self.hello, None
        was_up = hello is not None
        self.slots = SlotTable(0)
        if self._draining or self.retired:
            loss = Loss.LEFT
        if was_up:
            self._listener.left(self)
            self._listener.readiness_changed()
        self._had_room = False
        if reason and reason != self._last_loss:  # a worker that is away for hours is worth one line
            moved = f"; {len(lost)} sequences move on" if lost else ""
            logger.log(level, "worker %s: %s%s", self.address, reason, moved)
            self._last_loss = reason
        if hello is None:
            return
        if lost:
            self._note_loss(loss)
        noted = self._recovery.worker_lost(self.address, hello.epoch, loss)
        for choice in reversed(lost):  # each is put before those that were put back before it
            self._give_back(choice, None if choice in waited else noted, name)
        self._listener.capacity_changed()

    def _give_back(self, choice: Choice, loss: WorkerLoss | None, name: str) -> None:
        choice.link = None
        choice.request.trace.lost(choice, name)
        self._recovery.lost(choice, loss, begun=choice.running)

    def _note_loss(self, loss: Loss) -> None:
        if loss is not Loss.LEFT and self._breaker.lost():
            self._listener.rests(self)
            logger.warning("worker %s loses its work again and again; it rests %g s", self.address, self._breaker.pause)

    # ---- up ----

    def submit(self, choice: Choice, now: float) -> None:
        """Gives the worker a sequence; only when it ``has_room``. ``now`` is the loop's time."""
        request = choice.request
        choice.link, choice.running = self, False
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

    def subscribe(self) -> None:
        """Asks for all names that the worker's prefix cache knows, and for their changes from there on."""
        self._send(worker_pb2.RouterMessage(subscribe_kv_events=worker_pb2.SubscribeKvEvents()))

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

    async def _watch(self, call: Call) -> None:
        """Pings, and looks what became of the pings before."""
        interval = min(PING_INTERVAL_S, self._timeout / 5)
        for nonce in itertools.count():
            if self._heartbeat.health is Health.LOST:
                raise LinkLost(str(self._heartbeat))
            if self.retired and not self.slots.running:
                raise LinkLost("it is no longer one of the workers", Loss.LEFT)
            self._notice_room()
            self._send(worker_pb2.RouterMessage(ping=worker_pb2.Ping(nonce=nonce)))
            await asyncio.sleep(interval)
            self._heartbeat.tick(interval)

    def _notice_room(self) -> None:
        """Tells of room that came with time alone: the worker is no longer suspect, or its breaker's pause is over."""
        had_room, self._had_room = self._had_room, self.has_room
        if self._had_room and not had_room:
            self._listener.capacity_changed()

    async def _wait_broken(self, call: Call) -> None:
        await self._broken.wait()
        raise LinkLost("it does not read what it is sent")

    # ---- down ----

    async def _read(self, call: Call) -> None:
        while True:
            message = await next_message(call)
            try:
                self._obey(message)
            except OutOfStep as error:
                raise LinkLost(f"its messages do not fit together: {error}") from error

    def _obey(self, message: worker_pb2.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "step_batch":
                self._on_batch(message.step_batch)
            case "pong":
                self._on_pong(message.pong)
            case "rejected":
                self._on_rejected(message.rejected)
            case "kv_events":
                self._listener.told(self, message.kv_events)
                self._return_credit()
            case other:
                raise OutOfStep(f"{other} is unexpected here")

    def _on_pong(self, pong: worker_pb2.Pong) -> None:
        self._heartbeat.pong(pong)
        self._listener.heard(self, pong)
        if pong.draining:
            self._on_draining()
        self._notice_room()
        self._not_full()

    def _on_draining(self) -> None:
        if not self._draining:
            self._draining = True
            logger.info("worker %s is shutting down", self.name)
            self._listener.readiness_changed()

    def _on_batch(self, batch: worker_pb2.StepBatch) -> None:
        self._listener.progressed(self, batch)
        slots = self.slots
        for admitted in batch.admitted:
            choice = slots.find(admitted.slot, admitted.generation)
            if choice is not None:
                choice.admit(admitted.cached_tokens)
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
        given_up = [choice for row in batch.finished if (choice := self._on_finished(row)) is not None]
        self._return_credit()
        if batch.slots:
            self._breaker.progressed()
        if given_up and self.hello is not None:
            failed = any(row.reason == sampling_pb2.FINISH_REASON_ERROR and not row.field for row in batch.finished)
            loss = Loss.CRASHED if failed else Loss.FAILED
            self._note_loss(loss)
            noted = self._recovery.worker_lost(self.address, self.hello.epoch, loss)
            for choice in reversed(given_up):
                self._give_back(choice, noted, self.name)
        # A step that ends makes room, be it in the budget of the next one.
        self._full = False
        self._listener.capacity_changed()

    def _return_credit(self) -> None:
        """A message that takes credit was read."""
        self._credit_owed += 1
        if self._credit_owed >= CREDIT_WINDOW // 2:
            self._send(worker_pb2.RouterMessage(credit=worker_pb2.Credit(step_batches=self._credit_owed)))
            self._credit_owed = 0

    def _not_full(self) -> None:
        if self._full:
            self._full = False
            self._listener.capacity_changed()

    def _on_finished(self, row: worker_pb2.FinishedSlot) -> Choice | None:
        """A sequence ended. Returns its choice if another worker must take it up."""
        choice = self.slots.find(row.slot, row.generation)
        given_up = choice is not None and row.reason in _GIVEN_UP and not row.field
        if choice is not None and not given_up:
            stop_token_id = row.stop_token_id if row.HasField("stop_token_id") else None
            choice.finish(row.usage, row.reason, stop_token_id, row.error, row.field)
            choice.link = None
            self._breaker.succeeded()
        self.slots.free(row.slot, row.generation)
        if not given_up:
            return None
        logger.error("worker %s gave up a sequence: %s", self.name, row.error or "cancelled")
        return choice

    def _on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        choice = self.slots.find(rejected.slot, rejected.generation)
        self._listener.refused(self, rejected.slot, rejected.generation)
        self.slots.free(rejected.slot, rejected.generation)
        if rejected.reason == worker_pb2.Rejected.REASON_DRAINING:
            self._on_draining()
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
            self._listener.capacity_changed()


async def next_message(call: Call) -> worker_pb2.WorkerMessage:
    """The next message of a stream. Raises LinkLost at its end."""
    try:
        message: Any = await call.read()
    except grpc.aio.AioRpcError as error:
        loading = LOADING[0] in tuple(error.trailing_metadata() or ())
        broken = error.code() in _BROKEN or error.details() == _BROKEN_WRITE
        loss = Loss.BROKEN if broken else Loss.FAILED
        raise LinkLost(f"{error.code().name}: {error.details()}", loss, loading=loading) from None
    if message is grpc.aio.EOF:
        raise LinkLost("it closed the stream")
    received: worker_pb2.WorkerMessage = message
    return received

"""A worker without a model that gives every sequence a token at fixed times.

    python -m benchmarks.paced_worker SLOTS STEP_S

It prints its port, runs until its standard input ends, and then prints as JSON when it handed over each step's tokens,
and in which step each sequence got its first, by the length of its prompt.
"""

import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop

from protos import sampling_pb2, worker_pb2, worker_pb2_grpc
from protos.channel import SERVER_OPTIONS

# Ordinary words in the demo model's vocabulary.
_FIRST_TOKEN, _TOKENS = 1000, 1000


@dataclass
class _Running:
    prompt_tokens: int
    max_tokens: int
    sent: int = 0


class PacedWorker(worker_pb2_grpc.WorkerServicer):
    """Takes a step every ``step_s`` seconds while there are sequences; 0: as fast as the router grants credit.

    Attributes:
        steps: seconds of the monotonic clock, which all processes share.
        first_steps: index in ``steps`` by prompt tokens.
    """

    def __init__(self, slots: int, step_s: float) -> None:
        self._slots, self._step_s = slots, step_s
        self.steps: list[float] = []
        self.first_steps: dict[int, int] = {}
        self._running: dict[tuple[int, int], _Running] = {}
        self._admitted: list[worker_pb2.Admitted] = []
        self._pongs: list[worker_pb2.WorkerMessage] = []
        self._credit = 0
        self._wake = asyncio.Event()

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        hello = worker_pb2.Hello(
            protocol_version=2, worker_id="paced", epoch=secrets.randbits(63), model="demo", manifest_hash="m",
            vocab_size=49152, block_size=16, num_blocks=1 << 20, max_model_len=1 << 20, max_num_seqs=self._slots,
            max_num_batched_tokens=1 << 20, max_slots=self._slots,
        )  # fmt: skip
        yield worker_pb2.WorkerMessage(hello=hello)
        reader = asyncio.create_task(self._read(request_iterator))
        due = time.monotonic()
        try:
            while True:
                while self._pongs:
                    yield self._pongs.pop(0)
                wait = due - time.monotonic()
                if wait <= 0 and self._running and self._credit:
                    batch = self._step()
                    self.steps.append(time.monotonic())
                    yield worker_pb2.WorkerMessage(step_batch=batch)
                    # A late step does not make the next ones hurry.
                    due = max(due + self._step_s, time.monotonic())
                    await asyncio.sleep(0)
                    continue
                self._wake.clear()
                try:
                    async with asyncio.timeout(max(wait, 0) if self._running and self._credit else None):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            reader.cancel()

    async def _read(self, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    submit = message.submit
                    key = submit.slot, submit.generation
                    self._running[key] = _Running(len(submit.prompt_token_ids) // 4, submit.max_tokens)
                    self._admitted.append(worker_pb2.Admitted(slot=key[0], generation=key[1]))
                case "credit":
                    self._credit += message.credit.step_batches
                case "ping":
                    self._pongs.append(worker_pb2.WorkerMessage(pong=worker_pb2.Pong(nonce=message.ping.nonce)))
            self._wake.set()

    def _step(self) -> worker_pb2.StepBatch:
        self._credit -= 1
        batch = worker_pb2.StepBatch(step=len(self.steps) + 1, admitted=self._admitted)
        self._admitted.clear()
        for (slot, generation), sequence in list(self._running.items()):
            if not sequence.sent:
                self.first_steps[sequence.prompt_tokens] = len(self.steps)
            batch.slots.append(slot)
            batch.generations.append(generation)
            batch.first_indices.append(sequence.sent)
            batch.counts.append(1)
            batch.token_ids.append(_FIRST_TOKEN + (slot + sequence.sent) % _TOKENS)
            sequence.sent += 1
            if sequence.sent == sequence.max_tokens:
                del self._running[slot, generation]
                usage = sampling_pb2.Usage(
                    prompt_tokens=sequence.prompt_tokens, completion_tokens=sequence.sent, cached_tokens=0
                )
                reason = sampling_pb2.FINISH_REASON_LENGTH
                batch.finished.add(slot=slot, generation=generation, reason=reason, usage=usage)
        return batch


async def serve(slots: int, step_s: float) -> None:
    """Serves until the standard input ends."""
    worker = PacedWorker(slots, step_s)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)
    print(json.dumps({"steps": worker.steps, "first_steps": worker.first_steps}))


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))

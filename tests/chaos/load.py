"""Clients that never rest: each sends one request after the other and writes down what comes."""

import asyncio
import random
from collections.abc import Callable

import grpc

from protos import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.chaos.history import Order, Seen, faults_in
from tests.chaos.scripted_engine import STOP_TOKEN

TIMEOUT_S = 120.0
# What a client that comes while all workers are away is told, before a worker hears of it.
REFUSED = "UNAVAILABLE: no worker is ready to run the model; try again shortly"


def make_order(number: int, rng: random.Random, max_tokens: int) -> Order:
    """A request; one in two begins as others do, one in two draws its tokens, one in four must have a shape."""
    shared = random.Random(rng.randrange(4)).choices(range(1000, 2000), k=40) if rng.random() < 0.5 else []
    prompt = (*shared, *rng.choices(range(1000, 2000), k=rng.randint(1, 80)))
    seed = rng.randrange(2**40) if rng.random() < 0.5 else None
    shape = make_shape(random.Random(rng.randrange(8)), max_tokens) if rng.random() < 0.25 else ()
    tokens = rng.randint(10, max_tokens)
    n = 2 if rng.random() < 0.1 else 1
    # With both ends at one token, either reason would be right.
    return Order(f"r{number}", prompt, tokens + (tokens == len(shape)), seed, n, shape)


def make_shape(rng: random.Random, max_words: int) -> tuple[str, ...]:
    """Words of which each begins with one of some letters: whoever loses count finds the wrong ones."""
    return tuple(
        "".join(sorted(rng.sample("abcdefghij", rng.randint(1, 4)))) for _ in range(rng.randint(10, max_words))
    )


async def ask(stub: inference_pb2_grpc.InferenceStub, order: Order, seen: Seen | None = None) -> Seen:
    """Runs a request to its end. ``seen``: where what comes is put as it comes."""
    seen = seen or Seen(order)
    sampling = sampling_pb2.SamplingParams(temperature=0.0)
    if order.seed is not None:
        sampling = sampling_pb2.SamplingParams(temperature=1.0, seed=order.seed)
    if order.shape:
        sampling.regex = order.regex
    request = inference_pb2.GenerateRequest(
        request_id=order.id,
        model="model",
        token_ids=inference_pb2.TokenIds(ids=order.prompt),
        sampling=sampling,
        stopping=sampling_pb2.StopConditions(max_tokens=order.max_tokens, stop_token_ids=[STOP_TOKEN], ignore_eos=True),
        output=inference_pb2.OutputOptions(token_ids=True),
        n=order.n,
    )
    call = stub.Generate(request, timeout=TIMEOUT_S)
    try:
        async for response in call:
            for event in response.events:
                seen.add(event)
        seen.moves = int(dict(await call.trailing_metadata() or ()).get("x-quire-moves", 0))
    except grpc.aio.AioRpcError as error:
        seen.error = f"{error.code().name}: {error.details()}"
    return seen


class Load:
    """Clients of one router.

    Args:
        stub: calls it.
        streams: how many clients there are.
        seed: of the requests.
        max_tokens: most output tokens of a request.
        enough: asked before each request; True: send no more.

    Attributes:
        done: requests that came to an end.
        refused: how often one was sent again, as no worker was there when it came.
        moved, moved_with_shape: those that went on at another worker, and of these the ones that followed a grammar.
        faults: what the checker found in them.
    """

    def __init__(
        self,
        stub: inference_pb2_grpc.InferenceStub,
        streams: int,
        seed: int,
        enough: Callable[["Load"], bool],
        max_tokens: int = 120,
    ) -> None:
        self._stub = stub
        self._streams = streams
        self._rng = random.Random(seed)
        self._enough = enough
        self._max_tokens = max_tokens
        self.sent = 0
        self.done = self.refused = 0
        self.moved = self.moved_with_shape = 0
        self.tokens = 0
        self.faults: list[str] = []
        self._running: dict[str, Seen] = {}

    def progress(self) -> dict[tuple[str, int], int]:
        """Tokens that have come of each choice of the running requests, by request and choice."""
        return {
            (seen.order.id, index): sum(len(ids) for choice, _, ids in seen.deltas if choice == index)
            for seen in self._running.values()
            for index in range(seen.order.n)
            if all(finished.index != index for finished in seen.finished)
        }

    async def run(self) -> None:
        """Returns when all clients have stopped."""
        await asyncio.gather(*(self._client() for _ in range(self._streams)))

    async def _client(self) -> None:
        while not self._enough(self):
            order = make_order(self.sent, self._rng, self._max_tokens)
            self.sent += 1
            seen = self._running[order.id] = Seen(order)
            await ask(self._stub, order, seen)
            while seen.error == REFUSED and not seen.deltas:
                self.refused += 1
                await asyncio.sleep(0.1)
                seen = self._running[order.id] = Seen(order)
                await ask(self._stub, order, seen)
            del self._running[order.id]
            self.done += 1
            self.moved += seen.moves > 0
            self.moved_with_shape += seen.moves > 0 and bool(order.shape)
            self.tokens += sum(len(ids) for _, _, ids in seen.deltas)
            self.faults += faults_in(seen)

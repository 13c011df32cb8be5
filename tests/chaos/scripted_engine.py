"""A worker process whose model is a hash: ``python -m tests.chaos.scripted_engine PORT STEP_S``.

Everything else is the real worker: server, streams, scheduler, block pool, engine thread, signals. Token i of
a sequence depends on all tokens before it, read back through the block tables, on seed and i where it is drawn, and on
what its grammar allows: so any continuation can be checked exactly, whoever computed its beginning.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import uvloop
from numpy.typing import NDArray

from tests.doubles.fake_runner import FakeRunner
from worker.__main__ import serve
from worker.block_pool import BlockPool
from worker.config import WorkerConfig
from worker.engine import Engine, EngineLimits
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams
from worker.step_plan import Sampled, StepPlan
from worker.vocabulary import Vocabulary

# Output tokens are ordinary words in the demo model's vocabulary, apart from the one that ends an output.
VOCAB_SIZE = 49152
FIRST_TOKEN, NUM_TOKENS = 1000, 1000
STOP_TOKEN = 999
# One token in so many ends the output.
STOP_ONE_IN = 150

NUM_BLOCKS, BLOCK_SIZE = 400, 16
MAX_NUM_SEQS, MAX_BATCHED_TOKENS = 24, 256
MAX_MODEL_LEN = 1024


def fold(state: int, token: int) -> int:
    """The hash of a context, one token longer."""
    return (state * 6364136223846793005 + token + 1442695040888963407) & (2**64 - 1)


def drawn(state: int, seed: int | None, index: int) -> int:
    """What decides the token after a context with this hash; ``seed`` is None where tokens are not drawn."""
    if seed is not None:
        state = fold(fold(state, seed), index)
    return state ^ state >> 33


def token_of(draw: int) -> int:
    """The token where every token may come."""
    return STOP_TOKEN if draw % STOP_ONE_IN == 0 else FIRST_TOKEN + draw // STOP_ONE_IN % NUM_TOKENS


def allowed_token(draw: int, allowed: Sequence[int]) -> int:
    """The token where a grammar allows these, in ascending order."""
    return allowed[draw % len(allowed)]


def word(token: int) -> str:
    """What a token stands for, for grammars: three letters, a to j."""
    return "".join(chr(ord("a") + int(digit)) for digit in f"{token - FIRST_TOKEN:03d}")


def vocabulary() -> Vocabulary:
    """The words of all tokens that are ordinary output."""
    tokens = [b""] * VOCAB_SIZE
    for token in range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS):
        tokens[token] = word(token).encode()
    return Vocabulary(tokens, frozenset())


class ScriptedRunner(FakeRunner):
    """Takes so many seconds for a step."""

    def __init__(self, step_s: float) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_BATCHED_TOKENS)
        self._step_s = step_s
        self._free_at = 0.0
        self._draws: list[int] = []

    def launch(self, plan: StepPlan) -> "Timed":
        self._draws = []
        launched = super().launch(plan)
        self._free_at = max(self._free_at, time.monotonic()) + self._step_s
        return Timed(self, plan, launched.sampled().ids, self._draws, self._free_at)

    def choose(self, context: list[int], sampling: SamplingParams, output_index: int) -> int:
        state = 0
        for token in context:
            state = fold(state, token)
        draw = drawn(state, sampling.seed if sampling.temperature else None, output_index)
        self._draws.append(draw)
        return token_of(draw)


class Timed:
    """A step that is ready at a point of time; where grammars are followed, it is sampled from what they allow."""

    def __init__(self, runner: FakeRunner, plan: StepPlan, ids: list[int], draws: list[int], ready_at: float) -> None:
        self._runner, self._plan, self._ids, self._draws = runner, plan, ids, draws
        self._ready_at = ready_at

    def sample(self, bitmask: NDArray[np.int32]) -> None:
        plan = self._plan
        bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")
        for row, place in enumerate(plan.constrained):
            token = allowed_token(self._draws[place], np.flatnonzero(bits[row, :VOCAB_SIZE]).tolist())
            self._ids[place] = self._runner.last[plan.rows[plan.samples[place]]] = token

    def sampled(self) -> Sampled:
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        return Sampled(self._ids)


def loader(step_s: float) -> Callable[[WorkerConfig], tuple[Engine, EngineLimits, Vocabulary]]:
    """What ``worker.__main__.serve`` gets in place of a model."""

    def load(config: WorkerConfig) -> tuple[Engine, EngineLimits, Vocabulary]:
        scheduler = Scheduler(BlockPool(NUM_BLOCKS), BLOCK_SIZE, MAX_NUM_SEQS, MAX_BATCHED_TOKENS)
        engine = Engine(scheduler, ScriptedRunner(step_s), async_scheduling=True)
        limits = EngineLimits(
            model="scripted",
            manifest_hash="scripted",
            vocab_size=VOCAB_SIZE,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
        )
        return engine, limits, vocabulary()

    return load


def main() -> int:
    port, step_s = int(sys.argv[1]), float(sys.argv[2])
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s worker {port} %(message)s")
    config = WorkerConfig(Path("scripted"), port=port, shutdown_timeout=20.0)
    return uvloop.run(serve(config, loader(step_s)))


if __name__ == "__main__":
    sys.exit(main())

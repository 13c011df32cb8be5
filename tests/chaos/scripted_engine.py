"""A worker process whose model is a hash: ``python -m tests.chaos.scripted_engine PORT STEP_S``.

Everything else is the real worker: server, streams, scheduler, block pool, engine thread, signals. Token i of
a sequence depends on all tokens before it, read back through the block tables, and on seed and i where it is drawn: so
any continuation can be checked exactly, whoever computed its beginning.
"""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from tests.doubles.fake_runner import FakeRunner
from worker.__main__ import serve
from worker.block_pool import BlockPool
from worker.config import WorkerConfig
from worker.engine import Engine, EngineLimits
from worker.scheduler import Scheduler
from worker.sequence import SamplingParams
from worker.step_plan import Sampled, StepPlan
from worker.vocabulary import VocabularyError

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


def token_of(state: int, seed: int | None, index: int) -> int:
    """The token after a context with this hash; ``seed`` is None where tokens are not drawn."""
    if seed is not None:
        state = fold(fold(state, seed), index)
    state ^= state >> 33
    return STOP_TOKEN if state % STOP_ONE_IN == 0 else FIRST_TOKEN + state // STOP_ONE_IN % NUM_TOKENS


class ScriptedRunner(FakeRunner):
    """Takes so many seconds for a step."""

    def __init__(self, step_s: float) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_BATCHED_TOKENS)
        self._step_s = step_s
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> "Timed":
        launched = super().launch(plan)
        self._free_at = max(self._free_at, time.monotonic()) + self._step_s
        return Timed(launched.sampled(), self._free_at)

    def choose(self, context: list[int], sampling: SamplingParams, output_index: int) -> int:
        state = 0
        for token in context:
            state = fold(state, token)
        return token_of(state, sampling.seed if sampling.temperature else None, output_index)


class Timed:
    """A step that is ready at a point of time."""

    def __init__(self, sampled: Sampled, ready_at: float) -> None:
        self._sampled = sampled
        self._ready_at = ready_at

    def sampled(self) -> Sampled:
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        return self._sampled


def loader(step_s: float) -> Callable[[WorkerConfig], tuple[Engine, EngineLimits, VocabularyError]]:
    """What ``worker.__main__.serve`` gets in place of a model."""

    def load(config: WorkerConfig) -> tuple[Engine, EngineLimits, VocabularyError]:
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
        return engine, limits, VocabularyError("a hash has no vocabulary")

    return load


def main() -> int:
    port, step_s = int(sys.argv[1]), float(sys.argv[2])
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s %(levelname)s worker {port} %(message)s")
    config = WorkerConfig(Path("scripted"), port=port, shutdown_timeout=20.0)
    return uvloop.run(serve(config, loader(step_s)))


if __name__ == "__main__":
    sys.exit(main())

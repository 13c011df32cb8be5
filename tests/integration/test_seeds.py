"""A seeded request gives the same ids whatever the engine does around it, and over how many ranks the model is cut."""

import pytest
import torch

from tests.doubles.tiny_model import save_tiny
from worker.config import WorkerConfig
from worker.sequence import SamplingParams, Sequence, token_array
from worker.startup import build_engine

OUTPUT = 24
PROMPT = list(range(10, 20))
PARAMS = SamplingParams(temperature=1.0, top_p=0.95, seed=1234)
# The request stands among others with seeds of their own, each of other length.
AMONG = [([i % 100 + 10] * (i % 13 + 1), SamplingParams(temperature=1.2, seed=i)) for i in range(63)]
TOGETHER = [*AMONG[:30], (PROMPT, PARAMS), *AMONG[30:]]
# Blocks of four tokens: all 64 sequences fit, or about six.
ROOMY, TIGHT = 1000, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


@pytest.fixture(autouse=True)
def _threads():
    """Ranks share the cores, and so does the leader, which is this process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(model, wanted, ranks: int, blocks: int, async_scheduling: bool = False) -> tuple[list[list[int]], int]:
    """Outputs of requests that run together, and how often one was preempted."""
    config = WorkerConfig(
        model=model, device="cpu", dtype="float32", max_model_len=64, block_size=4, num_gpu_blocks_override=blocks,
        max_num_seqs=64, tensor_parallel_size=ranks, async_scheduling=async_scheduling,
    )  # fmt: skip
    engine, _ = build_engine(config)
    sequences = []
    try:
        for prompt, params in wanted:
            tokens = token_array()
            tokens.extend(prompt)
            sequences.append(Sequence("test", tokens, params, OUTPUT))
            engine.add(sequences[-1])
        while engine.has_unfinished:
            engine.step()
    finally:
        engine.close()
    return [seq.tokens.tolist()[seq.num_prompt_tokens :] for seq in sequences], engine.scheduler.num_preemptions


@pytest.fixture(scope="module")
def alone(model):
    """The output when nothing else runs, in one process."""
    ((output,), _) = run(model, [(PROMPT, PARAMS)], ranks=1, blocks=ROOMY)
    return output


def test_another_seed_gives_another_output(model, alone):
    """Else the tests below would prove nothing."""
    others = [(PROMPT, SamplingParams(temperature=1.0, top_p=0.95, seed=seed)) for seed in range(4)]
    outputs, _ = run(model, others, ranks=1, blocks=ROOMY)
    assert len({tuple(output) for output in [alone, *outputs]}) == 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_seed_gives_the_same_ids_alone_in_a_batch_and_after_preemption(model, alone, ranks):
    """Counter-based random numbers: nothing but seed and index counts."""
    assert run(model, [(PROMPT, PARAMS)], ranks, ROOMY)[0] == [alone]
    together, preemptions = run(model, TOGETHER, ranks, ROOMY)
    assert preemptions == 0
    assert together[30] == alone
    preempted, preemptions = run(model, TOGETHER, ranks, TIGHT)
    assert preemptions > 0
    assert preempted == together


@pytest.mark.parametrize("ranks", [1, 2])
def test_overlapped_steps_do_not_change_it(model, alone, ranks):
    preempted, preemptions = run(model, TOGETHER, ranks, TIGHT, async_scheduling=True)
    assert preemptions > 0
    assert preempted[30] == alone


def test_ranks_agree_on_every_request_of_a_batch(model):
    whole, _ = run(model, TOGETHER, ranks=1, blocks=ROOMY)
    assert run(model, TOGETHER, ranks=2, blocks=ROOMY)[0] == whole

"""In bfloat16 on a CPU, greedy output is the same bit for bit, however sequences are batched, chunked and cached."""

import pytest
import torch

from worker.config import WorkerConfig
from worker.sequence import SamplingParams, Sequence, token_array
from worker.setup import resolve_dtype
from worker.startup import build_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = (2, 17, 33, 61, 100, 200, 333, 520)


@pytest.fixture(scope="module")
def prompts():
    """Random tokens: after them the model is unsure, and the smallest difference shows."""
    torch.manual_seed(1)
    return [torch.randint(0, 49152, (length,)).tolist() for length in LENGTHS]


def generate(demo_model, prompts, at_once: bool, rounds: int = 1, **settings) -> list[list[int]]:
    """Greedy output of each prompt in the last round."""
    engine, _ = build_engine(WorkerConfig(model=demo_model, max_model_len=640, **settings))
    outputs = []
    for _ in range(rounds):
        outputs = []
        for prompt in prompts:
            tokens = token_array()
            tokens.extend(prompt)
            outputs.append(Sequence("test", tokens, SamplingParams(temperature=0.0), 18))
            engine.add(outputs[-1])
            while not at_once and engine.has_unfinished:
                engine.step()
        while engine.has_unfinished:
            engine.step()
    return [seq.tokens.tolist()[seq.num_prompt_tokens :] for seq in outputs]


def test_output_does_not_depend_on_the_company(demo_model, prompts):
    if resolve_dtype("auto", torch.device("cpu")) is not torch.bfloat16:
        pytest.skip("this processor does not compute with bfloat16")
    alone = generate(demo_model, prompts, at_once=False, enable_prefix_caching=False, max_num_batched_tokens=520)
    assert generate(demo_model, prompts, at_once=True) == alone
    assert generate(demo_model, prompts, at_once=True, max_num_seqs=8, max_num_batched_tokens=50) == alone
    assert generate(demo_model, prompts, at_once=True, rounds=2) == alone

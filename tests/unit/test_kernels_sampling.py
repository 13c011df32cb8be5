"""Sampling: filters against a plain definition, frequencies against exact probabilities, independence of the batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import gumbel_noise, keep_likely, random_key, sample
from worker.sequence import SamplingParams
from worker.step_input import build_sampling

CPU = torch.device("cpu")


def kept_by_definition(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """min_p, then top_k, then top_p, one token at a time, in float64."""
    weights = [math.exp(value - max(logits)) for value in logits]
    ids = sorted(range(len(logits)), key=lambda i: -weights[i])
    ids = [i for i in ids if weights[i] >= min_p]
    if top_k:
        ids = ids[:top_k]
    total = sum(weights[i] for i in ids) if top_k or min_p else sum(weights)
    kept, mass = set(), 0.0
    for i in ids:
        if kept and mass / total >= top_p:
            break
        kept.add(i)
        mass += weights[i]
    return kept


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    vocab=st.sampled_from([8, 40, 3000]),
)
def test_filters_match_their_definition(seed, top_k, top_p, min_p, vocab):
    torch.manual_seed(seed)
    logits = torch.randn(2, vocab) * 3
    got = keep_likely(
        logits,
        torch.tensor([top_k, 0]) if top_k else None,
        torch.tensor([top_p, 1.0]) if top_p < 1 else None,
        torch.tensor([min_p, 0.0]) if min_p else None,
    )
    want = kept_by_definition(logits[0].tolist(), top_k, top_p, min_p)
    kept = set(got[0].isfinite().nonzero().flatten().tolist())
    # Where a sum lands on top_p, float32 may fall either way: by one token, or by many that weigh nothing.
    differing = kept ^ want
    weight = logits[0].double().softmax(-1)[list(differing)].sum() if differing else 0.0
    assert len(differing) <= 1 or weight < 1e-5
    assert logits[0].argmax().item() in kept
    assert got[1].isfinite().all(), "a row without filters lost tokens"


def test_flat_logits_need_the_whole_vocabulary():
    """More candidates than the quick path looks at."""
    got = keep_likely(torch.linspace(0, 1e-3, 5000)[None], None, torch.tensor([0.9]), None)
    assert abs(int(got.isfinite().sum()) - 4500) <= 2


def draw(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """Token counts over output indices 0 to count - 1 of one seed."""
    ids = sample(logits.expand(count, -1), build_sampling([params] * count, list(range(count)), CPU))
    return torch.bincount(ids, minlength=len(logits)).double()


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_are_the_softmax(seed, temperature):
    """Chi-squared with 11 degrees of freedom; 1e-5 of right samplers exceed 45."""
    torch.manual_seed(3)
    logits = torch.randn(12)
    count = 20_000
    observed = draw(logits, SamplingParams(temperature=temperature, seed=seed), count)
    expected = (logits.double() / temperature).softmax(-1) * count
    assert ((observed - expected) ** 2 / expected).sum() < 45


STEPS = [0.4, 0.3, 0.2101, 0.05, 0.0299, 0.01]


@pytest.mark.parametrize(
    ("weights", "filters", "kept"),
    [
        (STEPS, SamplingParams(top_k=4, seed=9), 4),
        (STEPS, SamplingParams(top_p=0.699, seed=9), 2),
        (STEPS, SamplingParams(top_p=0.701, seed=9), 3),
        (STEPS, SamplingParams(top_p=0.91, seed=9), 3),
        ([1.0, 0.6, 0.3025, 0.2983, 0.1, 0.05], SamplingParams(min_p=0.3, seed=9), 3),
        (STEPS, SamplingParams(top_k=4, top_p=0.91, min_p=0.1, seed=9), 3),
    ],
)
def test_frequencies_with_filters(weights, filters, kept):
    """The limits lie close beside what they part, and what is kept keeps its proportions."""
    logits = torch.tensor(weights).log()
    count = 20_000
    observed = draw(logits, filters, count)
    assert observed[kept:].sum() == 0
    expected = logits[:kept].double().softmax(-1) * count
    assert ((observed[:kept] - expected) ** 2 / expected).sum() < 40


def test_noise_is_uniform_in_every_direction():
    """Over tokens, over indices and over seeds: the Gumbel noise becomes uniform under its distribution function."""

    def chi_squared(noise):
        uniform = torch.exp(-torch.exp(-noise.double())).flatten()
        cells = torch.histc(uniform.float(), bins=64, min=0, max=1).double()
        return ((cells - len(uniform) / 64) ** 2 / (len(uniform) / 64)).sum()

    def noise(keys, vocab):
        low, high = (torch.tensor(column) for column in zip(*keys, strict=True))
        return gumbel_noise(low, high, vocab)

    assert chi_squared(noise([random_key(5, 0)], 100_000)) < 130
    assert chi_squared(noise([random_key(5, index) for index in range(100_000)], 1)) < 130
    assert chi_squared(noise([random_key(seed, 3) for seed in range(100_000)], 1)) < 130


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    logits = torch.randn(9, 500)
    rows = [
        (SamplingParams(temperature=0.7, seed=11), 0),
        (SamplingParams(temperature=0.0), 4),
        (SamplingParams(temperature=1.0, top_k=5, seed=12), 7),
        (SamplingParams(temperature=1.0, top_p=0.8, seed=13), 2),
        (SamplingParams(temperature=1.3, min_p=0.1, seed=14), 2),
        (SamplingParams(temperature=1.0, seed=11), 1),
        (SamplingParams(temperature=0.2, top_p=0.5, top_k=3, seed=2**64 - 1), 99),
        (SamplingParams(temperature=1.0, seed=11), 0),
        (SamplingParams(temperature=0.0, top_k=2), 0),
    ]
    together = sample(logits, build_sampling(*map(list, zip(*rows, strict=True)), CPU)).tolist()
    alone = [
        sample(logits[i : i + 1], build_sampling([params], [index], CPU)).item()
        for i, (params, index) in enumerate(rows)
    ]
    assert together == alone
    assert together[1] == logits[1].argmax()
    assert together[8] == logits[8].argmax()


def test_known_ids_are_pinned():
    """A change of the random numbers changes what seeds mean to users."""
    logits = torch.zeros(1, 1000)
    ids = [sample(logits, build_sampling([SamplingParams(seed=42)], [index], CPU)).item() for index in range(5)]
    assert ids == [372, 149, 25, 334, 546]

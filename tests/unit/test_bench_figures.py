"""Figures of a run: percentiles, rates, failures, goodput, and how many requests ran at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.figures import Distribution, Times, figures_of, peak_concurrency
from quire.bench.records import Record
from quire.bench.serve import goodput_limits
from quire.bench.table import serving_json, serving_table

GOOD = Record(10.0, times=[10.1, 10.15, 10.35], tokens=5, prompt_tokens=7, cached_tokens=2, ended=10.4)
SHORT = Record(10.2, times=[10.3], tokens=1, prompt_tokens=3, ended=10.3)
REFUSED = Record(10.0, ended=10.05, error="http_429", detail="the queue is full")
CUT = Record(10.0, times=[10.1], prompt_tokens=9, ended=10.9, error="cut_off", detail="it ended")


def test_times_of_a_request() -> None:
    times = Times.of(GOOD)
    assert times.ttft == pytest.approx(100)
    assert times.tpot == pytest.approx(250 / 4), "tokens are the server's count, not that of messages"
    assert times.itl == pytest.approx([50, 200])
    assert times.e2e == pytest.approx(400)
    assert Times.of(SHORT).tpot is None


def test_a_failure_is_counted_and_its_times_and_tokens_are_not() -> None:
    figures = figures_of([GOOD, REFUSED, SHORT, REFUSED, CUT], 2.0, [50, 99])
    assert (figures.completed, figures.failed, figures.failures) == (2, 3, {"http_429": 2, "cut_off": 1})
    assert figures.examples == {"http_429": "the queue is full", "cut_off": "it ended"}
    assert (figures.prompt_tokens, figures.cached_tokens, figures.output_tokens) == (10, 2, 6)
    assert figures.ttft is not None
    assert figures.ttft.mean == pytest.approx(100)
    assert figures.tpot is not None
    assert figures.tpot.largest == pytest.approx(62.5)
    told = serving_json(figures, 4)
    assert (told["request_throughput"], told["output_throughput"], told["total_token_throughput"]) == (1.0, 3.0, 8.0)
    assert (told["not_sent"], told["request_goodput"]) == (4, None)
    table = serving_table(figures, 4)
    for part in ("requests, failed", "the queue is full", "it ended", "not sent", "p99"):
        assert part in table


def test_a_run_without_any_answer_has_a_table_too() -> None:
    figures = figures_of([REFUSED], 0.0, [50])
    assert figures.ttft is figures.itl is None
    assert "http_429" in serving_table(figures, 0)
    assert serving_json(figures, 0)["ttft_ms"] is None


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (["ttft:100.1"], 2), (["ttft:99"], 0), (["itl:199"], 1), (["itl:201", "e2e:390"], 1), (["tpot:62"], 1),
        (["tpot:63"], 2),
    ],
)  # fmt: skip
def test_goodput_counts_requests_that_keep_all_limits(limits: list[str], kept: int) -> None:
    figures = figures_of([GOOD, SHORT, REFUSED], 2.0, [50], goodput_limits(limits))
    assert figures.goodput == kept / 2


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "speed:3", "ttft:-1"])
def test_what_is_no_limit_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"--goodput {text}: "):
        goodput_limits([text])


@given(st.lists(st.floats(0, 1e6), min_size=1), st.lists(st.floats(0, 100), min_size=1, max_size=4, unique=True))
def test_percentiles_are_numpys(values: list[float], ranks: list[float]) -> None:
    found = Distribution.of(values, ranks)
    assert found is not None
    assert found.percentiles == {rank: np.percentile(values, rank) for rank in ranks}
    assert found.largest == max(values)


def test_no_values_have_no_distribution() -> None:
    assert Distribution.of([], [50]) is None


def test_peak_concurrency() -> None:
    spans = [(0, 2), (1, 3), (2, 4), (2.5, 2.7), (9, 9)]
    assert peak_concurrency([Record(began, ended=ended) for began, ended in spans]) == 3
    assert peak_concurrency([]) == 0

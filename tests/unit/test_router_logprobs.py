"""The router's record of log-probabilities: exact slices, nothing lost, nothing twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.sampling_pb2 import Logprobs
from router.token_logprobs import OutOfStep, TokenLogprobs


def wire(start: int, end: int, top_count: int) -> Logprobs:
    """The report of tokens [start, end): every number can be told from every other."""
    return Logprobs(
        logprobs=range(start, end),
        top_count=top_count,
        top_token_ids=[100 * index + place for index in range(start, end) for place in range(top_count)],
        top_logprobs=[100 * index + place for index in range(start, end) for place in range(top_count)],
    )


@given(
    first=st.integers(0, 2),
    top_count=st.integers(0, 3),
    pieces=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=8),
    cut=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_slices_of_what_came_in_pieces(first, top_count, pieces, cut):
    """Pieces may repeat what came before."""
    known = TokenLogprobs(first)
    end = first
    for count, repeated in pieces:
        start = max(first, end - repeated)
        known.add(start, wire(start, end + count, top_count))
        end += count
        assert known.end == end
    start, stop = sorted(min(max(at, first), end) for at in cut)
    got, want = known.of(start, stop), wire(start, stop, top_count)
    assert list(got.logprobs) == list(want.logprobs)
    assert list(got.top_token_ids) == list(want.top_token_ids)
    assert list(got.top_logprobs) == list(want.top_logprobs)


def test_a_gap_is_noticed():
    known = TokenLogprobs()
    known.add(0, wire(0, 2, 1))
    with pytest.raises(OutOfStep, match="from 3 on came when 2"):
        known.add(3, wire(3, 4, 1))

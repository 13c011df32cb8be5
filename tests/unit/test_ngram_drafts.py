"""Prompt lookup: what followed the last tokens before, against a plain search."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.speculation.ngram import continue_ngram


def plain(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    """The same by its definition."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for index in range(count):
                    text.append(text[start + size + index])
                return text[len(tokens) :]
    return []


# Ids whose bytes are alike, so that some places in the bytes begin within a token.
IDS = st.sampled_from([0, 1, 256, 257, 65536, 0x01010101])


@given(st.lists(IDS, min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 4), st.integers(0, 3))
def test_it_is_the_latest_place_of_the_longest_run(tokens, count, shortest, more):
    longest = shortest + more
    assert continue_ngram(array("I", tokens), count, longest, shortest) == plain(tokens, count, longest, shortest)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([9, 1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 8, 1, 2], [8, 8, 8, 8]),  # the latest place
        ([5, 1, 2, 3, 3, 3, 3, 0, 1, 2, 9, 9, 9, 9, 5, 1, 2], [3, 3, 3, 3]),  # but more tokens in common come first
        ([4, 7, 4, 7], [4, 7, 4, 7]),  # the copy goes on with itself
        ([1, 2, 3], []),
        ([3, 3], []),  # one token in common is too few
    ],
)
def test_examples(tokens, drafts):
    assert continue_ngram(array("I", tokens), 4, 3, 2) == drafts

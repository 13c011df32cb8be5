"""Log-probabilities arrive in OpenAI's shapes, the same whole as in any pieces."""

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.logprobs import Alternative, LogprobShaper, TokenLogprob, tokens_of
from protos.sampling_pb2 import Logprobs

TOKENS = [
    TokenLogprob(b"One", None, []),
    TokenLogprob(b" caf\xc3", -0.5, [Alternative(b" caf\xc3", -0.5), Alternative(b" tea", -2.0)]),
    TokenLogprob(b"\xa9", -3.0, [Alternative(b"!", -0.25), Alternative(b"!", -0.75)]),
]


def test_columns_become_tokens():
    wire = Logprobs(
        logprobs=[math.nan, -0.5, -3.0],
        top_count=2,
        top_token_ids=[1, 2, 3, 3],
        top_logprobs=[-0.5, -2.0, -0.25, -0.75],
    )
    got = tokens_of(wire, iter([b"One", b" caf\xc3", b"\xa9"]), iter([b" caf\xc3", b" tea", b"!", b"!"]))
    assert got == TOKENS


def test_chat_has_one_entry_a_token_with_its_bytes():
    shaped = LogprobShaper(chat=True, num_choices=1).shape(0, TOKENS[1:])
    first, second = shaped["content"]
    assert first["token"] == " caf\ufffd"
    assert bytes(first["bytes"] + second["bytes"]).decode() == " café"
    assert [entry["token"] for entry in first["top_logprobs"]] == [" caf\ufffd", " tea"]
    assert second["logprob"] == -3.0
    assert [entry["logprob"] for entry in second["top_logprobs"]] == [-0.25, -0.75]


def test_completions_have_four_lists():
    shaped = LogprobShaper(chat=False, num_choices=1).shape(0, TOKENS)
    assert shaped["tokens"] == ["One", " caf\ufffd", "\ufffd"]
    assert shaped["token_logprobs"] == [None, -0.5, -3.0]
    assert shaped["text_offset"] == [0, 3, 8]
    # The token itself is always there; of two alike the likelier is kept.
    assert shaped["top_logprobs"] == [None, {" caf\ufffd": -0.5, " tea": -2.0}, {"!": -0.25, "\ufffd": -3.0}]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=20))
def test_pieces_make_the_whole(cuts):
    """Two choices in any mixture: the lists of the pieces together are the lists of all tokens at once."""
    tokens = dict.fromkeys((0, 1), TOKENS * 5)
    taken = {0: 0, 1: 0}
    got = {index: {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for index in (0, 1)}
    shaper = LogprobShaper(chat=False, num_choices=2)
    for index, count in [*cuts, (0, 15), (1, 15)]:
        piece = tokens[index][taken[index] : taken[index] + count]
        taken[index] += len(piece)
        for name, values in shaper.shape(index, piece).items():
            got[index][name] += values
    for index in (0, 1):
        assert got[index] == LogprobShaper(chat=False, num_choices=1).shape(0, tokens[index])

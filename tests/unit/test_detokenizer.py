"""Text from ids as they come: however they are cut, the text is that of all ids at once, up to the stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from router.config import ConfigError
from router.detokenizer import Detokenizer
from router.stop_strings import StopMatch, StopMatcher, compile_stops
from router.token_bytes import TokenBytes

TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from(
            "a b\n<é漢字🥞🏳️‍🌈\u0301\u200d\ufffd"
        ),  # marks and joiners, and the replacement character itself
        st.characters(codec="utf-8"),
    ),
    max_size=40,
)


def cut(items, sizes):
    """The items in pieces of these sizes, over and over; what is left is the last piece."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(items[start : start + size])
        start += size
    return [*pieces, items[start:]]


def detokenized(token_bytes, ids, sizes, **options):
    detokenizer = Detokenizer(token_bytes, **options)
    texts = [detokenizer.push(piece)[0] for piece in cut(ids, sizes)]
    return [*texts, detokenizer.flush()]


@settings(deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 4), max_size=40))
def test_any_cut_of_a_text_gives_the_text(demo_tokenizer, text, sizes):
    ids = demo_tokenizer.encode_text(text)
    whole = demo_tokenizer._core.decode(ids)  # the text, but for the few bytes that the vocabulary lacks
    texts = detokenized(demo_tokenizer.token_bytes, ids, sizes)
    assert "".join(texts) == whole
    if "\ufffd" not in whole:
        assert all("\ufffd" not in piece for piece in texts), "half a character was shown"


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_ids_give_what_the_library_decodes(demo_tokenizer, data):
    """Ids in no sensible order, control tokens and bytes that are no UTF-8 among them."""
    byte_ids = st.sampled_from(
        [i for i, b in enumerate(demo_tokenizer.token_bytes.table) if len(b) == 1 and b > b"\x7f"]
    )
    ids = data.draw(st.lists(st.one_of(byte_ids, st.integers(0, 17), st.integers(0, 49151)), max_size=30))
    sizes = data.draw(st.lists(st.integers(1, 3), max_size=30))
    expected = demo_tokenizer._core.decode(ids, skip_special_tokens=True)
    assert "".join(detokenized(demo_tokenizer.token_bytes, ids, sizes)) == expected
    assert demo_tokenizer.decode(ids) == expected
    with_control = demo_tokenizer._core.decode(ids, skip_special_tokens=False)
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == with_control


def test_ids_beyond_the_vocabulary_are_no_text(demo_tokenizer):
    a, b = demo_tokenizer.encode_text("a")[0], demo_tokenizer.encode_text("b")[0]
    assert Detokenizer(demo_tokenizer.token_bytes).push([a, 49152, 60000, b]) == ("ab", 4)


# ---- stop strings ----


def first_stop(text: str, stops: tuple[str, ...], passed: int = 0) -> tuple[int, int] | None:
    """(start, end) of the match that ends first, of those the longest: the definition, as plainly as it can be said.

    Those count that end after the ``passed`` first characters.
    """
    for end in range(passed + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end - len(max(found, key=len)), end
    return None


LETTERS = st.text(alphabet="aab", max_size=20)
STOPS = st.lists(st.text(alphabet="aab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@settings(max_examples=500)
@given(
    text=LETTERS,
    stops=STOPS,
    sizes=st.lists(st.integers(0, 4), max_size=20),
    over=st.sampled_from([0, 0, 1, 2, 5]),
)
def test_matcher_finds_the_first_stop_in_any_cut(text, stops, sizes, over):
    """The first ``over`` pieces are passed over."""
    matcher = StopMatcher(compile_stops(stops))
    shown, passed = "", 0
    pieces = cut(text, sizes)
    ignored = len("".join(pieces[:over]))
    for number, piece in enumerate(pieces):
        result = matcher.pass_over(piece) if number < over else matcher.push(piece)
        if isinstance(result, StopMatch):
            start, end = first_stop(text, stops, ignored)
            assert (shown + result.before, result.stop, passed + result.end) == (text[:start], text[start:end], end)
            return
        shown += result
        passed += len(piece)
        held = text[len(shown) : passed]
        assert text[:passed] == shown + held
        # Nothing is held that cannot become a stop string, and all is held that can.
        longest = max(n for n in range(passed + 1) for s in stops if n < len(s) and text[:passed].endswith(s[:n]))
        assert len(held) == longest
    assert first_stop(text, stops, ignored) is None
    assert shown + matcher.flush() == text


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(alphabet="ab<é🥞", min_size=1, max_size=20),
    stops=st.lists(st.text(alphabet="ab<é🥞", min_size=1, max_size=3), min_size=1, max_size=3).map(tuple),
    sizes=st.lists(st.integers(1, 4), max_size=20),
    keep=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1, 2, 3, 7]),
)
def test_stop_counts_the_tokens_it_took(demo_tokenizer, text, stops, sizes, keep, min_tokens):
    ids = demo_tokenizer.encode_text(text)
    detokenizer = Detokenizer(demo_tokenizer.token_bytes, compile_stops(stops), keep_stop=keep, min_tokens=min_tokens)
    match = first_stop(text, stops, len(demo_tokenizer.decode(ids[:min_tokens]).rstrip("\ufffd")))
    shown, used = "", 0
    for piece in cut(ids, sizes):
        new, count = detokenizer.push(piece)
        shown, used = shown + new, used + count
        if detokenizer.stop_string is not None:
            break
    if match is None:
        assert detokenizer.stop_string is None
        assert (shown + detokenizer.flush(), used) == (text, len(ids))
        return
    start, end = match
    assert detokenizer.stop_string == text[start:end]
    assert shown == (text[:end] if keep else text[:start])
    needed = next(n for n in range(len(ids) + 1) if len(demo_tokenizer.decode(ids[:n]).rstrip("\ufffd")) >= end)
    assert used == needed


def test_what_is_passed_over_is_shown_at_once_unless_it_begins_a_longer_stop_string():
    matcher = StopMatcher(compile_stops(("ab", "abc")))
    assert matcher.pass_over("ab") == ""
    assert matcher.push("c") == StopMatch("", "abc", 1)
    matcher = StopMatcher(compile_stops(("ab", "bx")))
    assert matcher.pass_over("ab") == "a"
    assert matcher.push("x") == StopMatch("", "bx", 1)


def test_stop_string_may_be_found_at_the_very_end(demo_tokenizer):
    half = demo_tokenizer.encode_text("🥞")[:1]
    detokenizer = Detokenizer(demo_tokenizer.token_bytes, compile_stops(("\ufffd",)))
    assert detokenizer.push(half) == ("", 1)
    assert (detokenizer.flush(), detokenizer.stop_string) == ("", "\ufffd")


# ---- tokenizers of other kinds ----


def sentencepiece_like(decoder) -> Tokenizer:
    vocabulary = ["<unk>", "▁Hello", "▁world", "!", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], unk_token="<unk>"))
    core.decoder = decoder
    return core


LLAMA2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
)
METASPACE = decoders.Metaspace()


@pytest.mark.parametrize("decoder", [LLAMA2, METASPACE], ids=["llama 2", "metaspace"])
def test_sentencepiece_texts_lose_their_first_space_only_when_whole(decoder):
    core = sentencepiece_like(decoder)
    token_bytes = TokenBytes(core)
    ids = [1, 2, 3, 4, 1]
    assert token_bytes.text(ids) == core.decode(ids) == "Hello world!  Hello"
    # What continues a prompt keeps the space between the two.
    assert "".join(detokenized(token_bytes, ids, [1, 1, 1, 1])) == " Hello world!  Hello"


def test_byte_tokens_make_characters():
    core = sentencepiece_like(LLAMA2)
    ids = [1, *(core.token_to_id(f"<0x{byte:02X}>") for byte in "🥞".encode()), 3]
    assert detokenized(TokenBytes(core), ids, [1] * 6) == [" Hello", "", "", "", "🥞", "!", "", ""]
    assert TokenBytes(core).text(ids) == core.decode(ids)


def test_unknown_decoder_is_named():
    core = sentencepiece_like(decoders.WordPiece())
    with pytest.raises(ConfigError, match="WordPiece"):
        TokenBytes(core)

"""Filters of output against Python's own engine over the whole text: for each pattern, each text, each cut of it."""

import re
import time
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.output_policy.pattern import BannedPatterns, PatternError
from gateway.output_policy.text_filter import MAX_HELD_CHARS, REDACTED, CompiledPolicy, TextFilter
from protos.api_keys import OutputPolicy

CHARS = "ab é1"
ATOMS = st.sampled_from([*CHARS, ".", "[ab]", "[^a]", r"\d", r"\w", r"\W", r"\s", r"\S", r"[\db]", r"[\Wa]", r"[^\W]"])
COUNTS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?", "??", "{0,2}"])


def grown(inner):
    grouped = inner.map(lambda pattern: f"(?:{pattern})")
    return (
        st.lists(inner, min_size=2, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda several: f"(?:{'|'.join(several)})")
        # What may be empty is repeated in ways in which engines differ.
        | st.tuples(grouped.filter(never_empty), COUNTS).map("".join)
    )


def never_empty(pattern):
    return re.fullmatch(pattern, "") is None


# Borders of words are ASCII's for RE2, so that they stand in patterns without letters of other alphabets only.
WORDS = st.sampled_from([r"\bab?\b", r"\bb", r"a\b", r"\Ba+", r"\ba+ b\b|b"])
PATTERN = st.recursive(ATOMS, grown, max_leaves=6).filter(never_empty)
TEXT = st.text(CHARS, max_size=14)
CUTS = st.lists(st.integers(0, 1000), max_size=6)


def run(policy, text, cuts):
    """(what is let through, the filter) of a text that comes in pieces."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    one = TextFilter(CompiledPolicy.of(policy))
    passed = [one.push(text[start:end]) for start, end in pairwise(places)]
    return "".join([*passed, one.finish()]), one


@given(patterns=st.lists(PATTERN, min_size=1, max_size=2), text=TEXT, cuts=CUTS)
@example(patterns=["a(?:bb*d)?"], text="abbd", cuts=[1, 2, 3])
@example(patterns=["a.{3}b|b"], text="ab  b", cuts=[2])
def test_a_match_ends_the_output_before_it(patterns, text, cuts):
    match = re.search("|".join(f"(?:{pattern})" for pattern in patterns), text)
    passed, one = run(OutputPolicy(tuple(patterns)), text, cuts)
    assert passed == (text if match is None else text[: match.start()])
    assert one.matched == one.ended == (match is not None)


@given(pattern=PATTERN, text=TEXT, cuts=CUTS)
@example(pattern="a(?:bb*d)?", text="abbd", cuts=[1, 2, 3])
@example(pattern="a{2,}", text="aaaa", cuts=[1, 2, 3])
def test_matches_are_redacted(pattern, text, cuts):
    passed, one = run(OutputPolicy((pattern,), "redact"), text, cuts)
    assert passed == re.sub(pattern, REDACTED, text)
    assert not one.ended
    assert one.matched == (passed != text)


@given(pattern=WORDS, text=st.text("ab ,", max_size=12), cuts=CUTS)
def test_borders_of_words_are_those_of_the_whole_text(pattern, text, cuts):
    passed, _ = run(OutputPolicy((pattern,), "redact"), text, cuts)
    assert passed == re.sub(pattern, REDACTED, text)


@pytest.mark.parametrize(
    ("pattern", "text", "held"),
    [
        ("abc", "xxab", "ab"),
        ("abc", "xxabb", ""),
        ("a+b", "xaaa", "aaa"),
        ("a{2,3}b", "aaaa", "aaa"),
        ("(?:ab|cd)e", "abcd", "cd"),
        ("(?:ab){2}c", "xababab", "abab"),
        ("[0-9]{3}-[0-9]{4}", "call 555-12", "555-12"),
        (r"\bab", "xa", ""),
        (r"\bab", "x a", "a"),
        (r"ab\b", "ab", "ab"),
        (r"ab\b", "abc", ""),
        ("ab?", "a", "a"),
    ],
)
def test_only_what_may_become_a_match_is_held_back(pattern, text, held):
    one = TextFilter(CompiledPolicy.of(OutputPolicy((pattern,))))
    assert one.push(text) == text[: len(text) - len(held)]
    assert not one.ended


def test_flags():
    assert run(OutputPolicy(("(?i)secret",)), "My SeCrEt", [5])[0] == "My "
    assert run(OutputPolicy(("(?s)a.b",)), "xa\nb", [2])[0] == "x"
    assert run(OutputPolicy(("a.b",)), "xa\nb", [2])[0] == "xa\nb"


def test_a_plain_word_is_held_no_longer_than_it_may_come():
    one = TextFilter(CompiledPolicy.of(OutputPolicy(("secret",))))
    assert [one.push(piece) for piece in ("a s", "ec", "ond", " se")] == ["a ", "", "second", " "]
    assert one.finish() == "se"


def test_a_longest_output():
    passed, one = run(OutputPolicy(max_chars=5), "abcdefgh", [3])
    assert (passed, one.ended, one.matched) == ("abcde", True, False)
    passed, one = run(OutputPolicy(max_chars=8), "abcdefgh", [3])
    assert (passed, one.ended) == ("abcdefgh", False)
    assert run(OutputPolicy(("b",), "redact", 4), "abc", [])[0] == "a" + REDACTED[:3]


def test_what_cannot_be_decided_for_long_counts_as_a_match():
    passed, one = run(OutputPolicy(("a.*z",)), "xa" + "b" * MAX_HELD_CHARS, [1, 9])
    assert (passed, one.matched, one.ended) == ("x", True, True)
    assert run(OutputPolicy(("a.*z",)), "xa" + "b" * 100, [1, 9])[0] == "xa" + "b" * 100


@pytest.mark.timeout(20)
def test_patterns_that_trap_backtracking_engines_take_linear_time():
    began = time.monotonic()
    run(OutputPolicy(("(?:a|aa|a[a])+(?:a?){20}b",), "redact"), "a" * 4000 + "c", [])
    run(OutputPolicy(("ab",), "redact"), "ab" * 100_000, [])
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "must have 1 to"),
        ("x" * 1001, "must have 1 to"),
        ("(", "is no pattern"),
        ("a*", "matches the empty text"),
        ("^a", "cannot be watched for"),
        ("a$", "cannot be watched for"),
        ("(?=a)b", "cannot be watched for"),
        ("(?<!a)b", "cannot be watched for"),
        (r"(a)\1", "cannot be watched for"),
        ("(?x)a b", "flag other than"),
        ("(?i:a)b", "flags for a group"),
        (r"[^\Wa]", "beside others"),
        ("a{1001}", "RE2 refuses"),
        ("(?:(?:a{1,900}){1,900}){1,900}", "RE2 refuses"),
    ],
)
def test_patterns_that_cannot_be_watched_for_are_refused(pattern, message):
    with pytest.raises(PatternError, match=re.escape(message)):
        BannedPatterns([pattern])

"""Keys as settings, and their limits over any history of use."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access import guard
from gateway.access.guard import KeyRing
from gateway.access.limits import MINUTE_S, KeyUse, MinuteWindow
from gateway.config import ConfigError, parse_args
from gateway.errors import ApiError
from protos.api_keys import ApiKey, KeyFileError, OutputPolicy, digest_of, read_keys

SECRET = hashlib.sha256(b"secret").hexdigest()

# Steps in time, in thousandths of a second so that sums are exact, and amounts.
HISTORY = st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 5)), max_size=60)


@given(history=HISTORY, limit=st.integers(1, 20))
def test_no_minute_has_more_than_its_limit_and_one_amount(history, limit):
    window = MinuteWindow(limit)
    now = 0
    taken: list[tuple[int, int]] = []
    for step, amount in history:
        now += step
        if window.wait(now / 1000) == 0:
            before = sum(size for at, size in taken if at > now - MINUTE_S * 1000)
            assert before < limit
            window.add(now / 1000, amount)
            taken.append((now, amount))
        else:
            # What is refused would have been too much within a minute and a second.
            assert sum(size for at, size in taken if at > now - (MINUTE_S + 1) * 1000) >= limit


@given(history=HISTORY, limit=st.integers(1, 20))
def test_after_the_wait_there_is_room_and_not_before(history, limit):
    window = MinuteWindow(limit)
    now = 0.0
    for step, amount in history:
        now += step / 1000
        window.add(now, amount)
    wait = window.wait(now)
    assert 0 <= wait <= MINUTE_S + 1
    if wait > 1:
        assert window.wait(now + wait - 1) > 0
    assert window.wait(now + wait + 1e-6) == 0


def test_a_window_holds_seconds_and_not_events():
    window = MinuteWindow(10**9)
    for event in range(100_000):
        window.add(event / 1000, 1)
    assert len(window._sums) <= MINUTE_S + 2


def use(**limits):
    return KeyUse(ApiKey(digest_of("secret"), **limits))


def refused(key_use, now):
    with pytest.raises(ApiError) as raised:
        key_use.admit(now)
    error = raised.value
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    return error


def test_requests_a_minute():
    key_use = use(requests_per_minute=2)
    key_use.admit(0.5)
    key_use.admit(10.0)
    error = refused(key_use, 20.0)
    assert error.retry_after == 41
    assert "2 requests a minute" in error.message
    # What was refused does not count.
    key_use.admit(61.0)
    refused(key_use, 61.5)


def test_tokens_a_minute_are_those_that_were_used():
    key_use = use(tokens_per_minute=100)
    key_use.admit(0.0)
    key_use.charge(0.0, 99)
    key_use.admit(1.0)
    key_use.charge(1.0, 50)
    assert "100 tokens a minute" in refused(key_use, 2.0).message
    key_use.admit(61.0)


def test_requests_at_a_time():
    key_use = use(max_concurrent_requests=2)
    key_use.admit(0.0)
    key_use.admit(0.0)
    assert refused(key_use, 1.0).retry_after == 1
    key_use.end()
    key_use.admit(1.0)


def test_a_ring_finds_each_key_and_no_other():
    ring = KeyRing([ApiKey(digest_of(name)) for name in ("a", "b", "c")])
    assert [ring.find(name).key.sha256 for name in ("a", "b", "c")] == [digest_of(name) for name in ("a", "b", "c")]
    assert ring.find("d") is ring.find("") is ring.find(digest_of("a").hex()) is None
    assert ring.find("a") is ring.find("a")


def test_every_key_is_compared_whichever_it_is(monkeypatch):
    """A search that ends at the key it finds tells how far it went by the time it took."""
    compared = []
    whole = guard.hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append(a) or whole(a, b))
    ring = KeyRing([ApiKey(digest_of(name)) for name in ("a", "b", "c")])
    for name in ("a", "c", "none"):
        compared.clear()
        ring.find(name)
        assert compared == [digest_of("a"), digest_of("b"), digest_of("c")]


def write(tmp_path, content):
    path = tmp_path / "keys.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_file_of_keys(tmp_path):
    full = {
        "sha256": SECRET, "tenant": "t", "priority_ceiling": -3, "requests_per_minute": 1, "tokens_per_minute": 2,
        "max_concurrent_requests": 3, "output_policy": {"banned_patterns": ["a"], "on_match": "redact", "max_chars": 9},
    }  # fmt: skip
    other = {"sha256": hashlib.sha256(b"other").hexdigest().upper()}
    first, second = read_keys(write(tmp_path, {"keys": [full, other]}))
    assert first == ApiKey(digest_of("secret"), "t", -3, 1, 2, 3, OutputPolicy(("a",), "redact", 9))
    assert second == ApiKey(digest_of("other"))
    assert "sha256" not in repr(first)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([], "must be an object"),
        ({"keys": [], "more": 1}, "must be an object"),
        ({"keys": []}, "has no keys"),
        ({"keys": ["secret"]}, r"keys\[0\] must be an object"),
        ({"keys": [{}]}, r"keys\[0\].sha256 must be 64"),
        ({"keys": [{"sha256": "secret"}]}, r"keys\[0\].sha256 must be 64"),
        ({"keys": [{"sha256": SECRET}, {"sha256": SECRET}]}, "the same sha256 twice"),
        ({"keys": [{"sha256": SECRET, "rpm": 1}]}, "'rpm', which is not known"),
        ({"keys": [{"sha256": SECRET, "requests_per_minute": 0}]}, "requests_per_minute must be"),
        ({"keys": [{"sha256": SECRET, "tokens_per_minute": "9"}]}, "tokens_per_minute must be"),
        ({"keys": [{"sha256": SECRET, "max_concurrent_requests": True}]}, "max_concurrent_requests must be"),
        ({"keys": [{"sha256": SECRET, "priority_ceiling": 1.5}]}, "priority_ceiling must be"),
        ({"keys": [{"sha256": SECRET, "output_policy": []}]}, "output_policy must be an object"),
        ({"keys": [{"sha256": SECRET, "output_policy": {"ban": []}}]}, "output_policy must be an object"),
        ({"keys": [{"sha256": SECRET, "output_policy": {"banned_patterns": "a"}}]}, "must be a list of texts"),
        ({"keys": [{"sha256": SECRET, "output_policy": {"banned_patterns": [1]}}]}, "must be a list of texts"),
        ({"keys": [{"sha256": SECRET, "output_policy": {"on_match": "x"}}]}, "on_match must be end or redact"),
        ({"keys": [{"sha256": SECRET, "output_policy": {"max_chars": 0}}]}, "max_chars must be"),
        ({"keys": [{"sha256": SECRET, "tenant": "x" * 201}]}, "tenant must be"),
        ({"keys": [{"sha256": SECRET, "tenant": "a/b"}]}, "tenant must be"),
    ],
)
def test_files_that_are_not_understood_are_refused(tmp_path, content, message):
    with pytest.raises(KeyFileError, match=message):
        read_keys(write(tmp_path, content))


def test_keys_come_from_flags_the_environment_and_a_file(tmp_path, monkeypatch):
    path = write(tmp_path, {"keys": [{"sha256": SECRET, "tenant": "t"}]})
    monkeypatch.setenv("QUIRE_API_KEY", "of-the-environment")
    config = parse_args(["--api-key", "one", "--api-key", "secret", "--api-keys-file", str(path)])
    assert {key.sha256 for key in config.api_keys} == {
        digest_of(key) for key in ("one", "secret", "of-the-environment")
    }
    # Who is given as a flag as well has what the file says.
    assert [key.tenant for key in config.api_keys if key.sha256 == digest_of("secret")] == ["t"]
    assert "secret" not in repr(config)
    monkeypatch.delenv("QUIRE_API_KEY")
    assert parse_args([]).api_keys == ()


@pytest.mark.parametrize("key", ["", "two words", "ключ", "a\n"])
def test_keys_that_no_header_can_carry_are_refused(key):
    with pytest.raises(ConfigError, match="--api-key must be"):
        parse_args(["--api-key", key])


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"--api-keys-file: cannot read /no/such: No such file"):
        parse_args(["--api-keys-file", "/no/such"])

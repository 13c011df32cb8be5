"""Ctrl-C during a step."""

import signal

import pytest

from quire.offline.interrupts import after_this


@pytest.fixture(autouse=True)
def _interruptible():
    """A shell starts what it puts into the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_one_waits():
    reached = False
    with pytest.raises(KeyboardInterrupt), after_this():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_one_does_not():
    with pytest.raises(KeyboardInterrupt), after_this():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_passes():
    with pytest.raises(ZeroDivisionError), after_this():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

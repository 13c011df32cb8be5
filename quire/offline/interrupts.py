"""Keeps Ctrl-C out of a step: what it left half done would spoil the KV cache for later requests."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def after_this() -> Iterator[None]:
    """Lets a first SIGINT that comes meanwhile take effect at the end; a second one takes effect at once."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield  # signals are another thread's, or SIGINT does nothing that Python could put off
        return
    handle = previous
    waiting = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        if waiting:
            handle(number, frame)
        waiting = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if waiting:  # not reached when a second one has raised
        signal.raise_signal(signal.SIGINT)

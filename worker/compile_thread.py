"""A thread for work that recurs deeply."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class CompileThread:
    """A thread with a deep stack. It does not hold up the process's end, whatever it is at.

    Args:
        stack_bytes: address space of its stack; memory is taken as it is used.
    """

    def __init__(self, stack_bytes: int) -> None:
        # Bounded by the sequences that the server admits.
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        before = threading.stack_size(stack_bytes)  # the process's setting at the moment when a thread starts
        try:
            threading.Thread(target=self._run, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(before)

    def submit(self, work: Callable[[], Result]) -> "Future[Result]":
        """Has a function called on the thread."""
        future: Future[Result] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """Ends the thread after all that was submitted before."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

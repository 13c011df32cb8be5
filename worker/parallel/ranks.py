"""The leader's hold on its other ranks: starts their processes, watches them, and ends all when one ends.

A rank that is killed, crashes or is stopped by a signal is noticed at once, between two steps too; one that hangs is
noticed when a step waits for it for longer than a collective operation may take. Either way all ranks are killed, which
wakes the leader from the step that waits for them.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from worker.child_environment import child_environment
from worker.config import WorkerConfig
from worker.parallel.channel import Channel
from worker.parallel.group import COLLECTIVE_TIMEOUT_S, join_group
from worker.parallel.shards import Parallel

logger = logging.getLogger(__name__)

# Ranks load at the leader's pace; this only bounds how long one that hangs there stays unnoticed.
_START_TIMEOUT_S = 3600.0
_END_TIMEOUT_S = 2.0
# An operation fails a moment before or after the kernel reports the end of the process that it waited for.
_REPORT_DELAY_S = 1.0


class RankFailed(RuntimeError):
    """A rank ended, was stopped, or did not answer; the worker cannot go on.

    Where nothing is known but that an operation over the ranks failed, that error is the cause.
    """


class _Rank:
    """A started process and the leader's end of its channel."""

    def __init__(self, number: int, threads: int | None) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        environment = child_environment()
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "worker.rank", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in the terminal is for the leader alone
            )
        self.channel = Channel(ours)

    def wait_for_trouble(self) -> str:
        """Waits until the process ends or is stopped, and says which."""
        pid = self.process.pid
        if not hasattr(os, "waitid"):
            return f"ended with status {self.process.wait()}"
        try:
            # WNOWAIT leaves the process to Popen, which collects its status.
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        except ChildProcessError:
            found = None
        if found is None:
            return "is gone"
        if found.si_code == os.CLD_EXITED:
            return f"ended with status {found.si_status}"
        verb = "was stopped by" if found.si_code == os.CLD_STOPPED else "was killed by"
        return f"{verb} {signal.Signals(found.si_status).name}"


class Ranks:
    """Ranks 1 and up of a worker. Starts their processes at once; ``close`` must be called.

    Args:
        size: how many ranks there are, the leader included.
        threads: processor threads for each; None leaves it to the environment.
    """

    def __init__(self, size: int, threads: int | None) -> None:
        self.size = size
        self._folder = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
        self._store = self._folder / "store"
        self._lock = threading.Lock()
        self._closing = False
        self._failure: RankFailed | None = None
        self._on_failure: Callable[[Exception], None] | None = None
        self._reported = threading.Event()
        self._ranks: list[_Rank] = []
        self._watchers: list[threading.Thread] = []
        try:
            for number in range(1, size):
                self._ranks.append(_Rank(number, threads))
        except OSError as error:
            self.close()
            raise RankFailed(f"rank {number} could not be started: {error}") from error
        for rank in self._ranks:
            watcher = threading.Thread(target=self._watch, args=(rank,), name=f"watch rank {rank.number}", daemon=True)
            watcher.start()
            self._watchers.append(watcher)

    def configure(self, configs: list[WorkerConfig]) -> None:
        """Waits until the processes are up, and sends each its settings; ``configs`` begins with rank 1's.

        Raises:
            RankFailed: a rank could not start.
        """
        self.gather()
        for rank, config in zip(self._ranks, configs, strict=True):
            settings = {**asdict(config), "model": str(config.model)}
            self._tell(rank, number=rank.number, size=self.size, store=str(self._store), config=settings)

    def join(self, device: torch.device) -> Parallel:
        """Joins the group as rank 0, as the others do once they are configured. Raises RankFailed."""
        try:
            return join_group(self._store, 0, self.size, device)
        except RuntimeError as error:
            failure = self.explain(error)
            raise failure from failure.__cause__

    def forget_store(self) -> None:
        """Removes the file through which the ranks found each other: all have joined, and gloo needs it no more.

        Not left to ``close``, which a leader that is killed does not come to.
        """
        shutil.rmtree(self._folder, ignore_errors=True)

    def gather(self) -> list[dict[str, Any]]:
        """One message of named values from each rank.

        Raises:
            RankFailed: a rank reports that it cannot go on, or is gone.
        """
        found = []
        for rank in self._ranks:
            try:
                values = rank.channel.receive_values(_START_TIMEOUT_S)
            except OSError as error:
                failure = self.explain(error)
                raise failure from failure.__cause__
            if "error" in values:
                raise RankFailed(f"rank {rank.number}: {values['error']}")
            found.append(values)
        return found

    def tell(self, **values: Any) -> None:
        """Sends named values to every rank. Raises RankFailed when one is gone."""
        for rank in self._ranks:
            self._tell(rank, **values)

    def _tell(self, rank: _Rank, **values: Any) -> None:
        try:
            rank.channel.send_values(**values)
        except OSError as error:
            failure = self.explain(error)
            raise failure from failure.__cause__

    def send(self, message: bytes) -> None:
        """Sends a message to every rank.

        Raises:
            OSError: a rank is gone or does not read.
        """
        for rank in self._ranks:
            rank.channel.send(message, COLLECTIVE_TIMEOUT_S)

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Calls ``on_failure`` once, on another thread, when a rank ends or is stopped, or has been already."""
        with self._lock:
            self._on_failure = on_failure
            failure = self._failure
        if failure is not None:
            on_failure(failure)

    def explain(self, error: Exception) -> RankFailed:
        """Why working together failed: the rank that ended, where one did, else ``error``. All ranks are ended."""
        self._reported.wait(_REPORT_DELAY_S)
        with self._lock:
            if self._failure is None:
                self._failure = RankFailed(
                    f"{self.size} ranks failed to work together: {type(error).__name__}: {error}"
                )
                logger.error("%s; ending all ranks", self._failure)
            failure = self._failure
        self._kill()
        return failure

    @property
    def failed(self) -> bool:
        """Whether a rank was lost."""
        with self._lock:
            return self._failure is not None

    def close(self) -> None:
        """Ends all ranks: those that are well end by themselves when their channel closes, the others are killed."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for rank in self._ranks:
            rank.channel.close()
        for rank in self._ranks:
            try:
                rank.process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        for watcher in self._watchers:
            watcher.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self, rank: _Rank) -> None:
        trouble = rank.wait_for_trouble()
        with self._lock:
            if self._closing or self._failure is not None:
                return
            failure = RankFailed(f"rank {rank.number} (process {rank.process.pid}) {trouble}")
            self._failure = failure
            on_failure = self._on_failure
        logger.error("%s; ending all ranks", failure)
        self._reported.set()
        self._kill()
        if on_failure is not None:
            on_failure(failure)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()

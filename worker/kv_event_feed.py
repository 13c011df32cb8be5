"""What a router has yet to hear of the prefix cache: a snapshot, then changes. See KvEvents in protos/worker.proto."""

from protos import worker_pb2
from worker.prefix_changes import PrefixChanges

# Names of 16 bytes each in one message, and changed ones that may wait for the router: a megabyte.
MAX_NAMES = 65_536


class KvEventFeed:
    """Bounded by the blocks there are for a snapshot, and by ``max_names`` for the changes after it.

    Args:
        epoch: the worker's.
        max_names: in one message, and in all changes that wait. More of them are dropped: a new snapshot is cheaper.
    """

    def __init__(self, epoch: int, max_names: int) -> None:
        self._epoch = epoch
        self._max_names = max_names
        self._sequence = 0
        self._awaits_snapshot = False
        # Whether the router has a snapshot, or part of it, and all changes since.
        self._follows = False
        self._has_lost = False
        self._snapshot_begins = False
        self._snapshot: list[bytes] = []
        self._changes = PrefixChanges()

    @property
    def has_pending(self) -> bool:
        """Whether there is something to ``take``."""
        return bool(self._has_lost or self._snapshot_begins or self._snapshot or self._changes)

    def ask(self) -> bool:
        """The router asks for a snapshot. False: one that was asked for is still to come, and will do."""
        asks, self._awaits_snapshot = not self._awaits_snapshot, True
        return asks

    def restart(self, names: list[bytes]) -> None:
        """Begins anew with all names known now; takes the list over. What was pending is of no use any more."""
        self._drop()
        self._awaits_snapshot = self._has_lost = False
        self._follows = self._snapshot_begins = True
        self._snapshot = names

    def add(self, changes: PrefixChanges) -> None:
        """Takes in what changed, unless the router does not follow; drops everything when too much is pending."""
        if not self._follows:
            return
        self._changes.extend(changes)
        if len(self._changes) > self._max_names:
            self._drop()
            self._follows, self._has_lost = False, True
            self._sequence += 1  # the gap

    def take(self) -> worker_pb2.KvEvents:
        """The next message; only when there is one."""
        self._sequence += 1
        events = worker_pb2.KvEvents(epoch=self._epoch, sequence=self._sequence)
        if self._has_lost:
            self._has_lost = False
        elif self._snapshot_begins or self._snapshot:
            events.snapshot = events.cleared = self._snapshot_begins
            events.stored = b"".join(self._snapshot[: self._max_names])
            del self._snapshot[: self._max_names]
            self._snapshot_begins = False
        else:
            events.cleared = self._changes.cleared
            events.removed = b"".join(self._changes.removed)
            events.stored = b"".join(self._changes.stored)
            self._changes = PrefixChanges()
        return events

    def _drop(self) -> None:
        self._snapshot_begins = False
        self._snapshot = []
        self._changes = PrefixChanges()

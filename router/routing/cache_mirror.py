"""What the router believes of one worker's prefix cache.

The worker's events say what is in it. Blocks of sequences that are on their way there are predicted: two requests that
follow each other closely shall find each other's prefix. All names stand in the order of their use, so that the router
can tell by itself what the worker evicts when its events fail.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum
from itertools import islice

from protos import worker_pb2
from router.routing.prefix_index import PrefixIndex

NAME_BYTES = 16
# Seconds that a block may be computed, or a snapshot be asked for, without a word of it from the worker.
STALE_S = 2.0


class MirrorState(StrEnum):
    """How far what is known can be trusted."""

    # A snapshot came and every change since.
    EXACT = "exact"
    # A change was missed and a new snapshot is under way.
    DEGRADED = "degraded"
    # The worker tells nothing, or no more: what was sent there is known, and the least recently used goes first.
    APPROXIMATE = "approximate"


class CacheMirror:
    """One worker's cache.

    Args:
        index: where others look up what this worker has.
        worker: the worker's number there.
        capacity: blocks that its cache holds; 0: it keeps none.
        epoch: of the worker's process.
    """

    def __init__(self, index: PrefixIndex, worker: int, capacity: int, epoch: int) -> None:
        self._index = index
        self._worker = worker
        self._capacity = capacity
        self._epoch = epoch
        # By last use, least recently used first.
        self._names: OrderedDict[bytes, float] = OrderedDict()
        # Those of them that the worker has not told of.
        self._predicted: set[bytes] = set()
        self._sequence: int | None = None
        self._follows = False
        self._asked: float | None = None
        self._expected: float | None = None

    def __len__(self) -> int:
        """Blocks that the worker has or will have."""
        return len(self._names)

    def state(self, now: float) -> MirrorState:
        """How far what is known can be trusted."""
        if self._follows:
            stale = self._expected is not None and now - self._expected >= STALE_S
            return MirrorState.APPROXIMATE if stale else MirrorState.EXACT
        if self._sequence is not None and self._asked is not None and now - self._asked < STALE_S:
            return MirrorState.DEGRADED
        return MirrorState.APPROXIMATE

    def ask(self, now: float) -> bool:
        """Whether to ask the worker for a snapshot now, and that this is done. Once in ``STALE_S`` seconds."""
        if not self._capacity or self.state(now) is MirrorState.EXACT:
            return False
        if self._asked is not None and now - self._asked < STALE_S:
            return False
        self._asked = now
        return True

    @property
    def has_room(self) -> bool:
        """Whether more blocks can be kept without evicting any."""
        return len(self._names) < self._capacity

    def coldness(self, now: float) -> float:
        """Seconds since the least recently used block was used, which goes next; infinite while there is room."""
        if self.has_room or not self._names:
            return math.inf
        return now - next(iter(self._names.values()))

    # ---- what the worker tells ----

    def apply(self, events: worker_pb2.KvEvents, now: float) -> None:
        """Takes in a message. After a gap in the numbers nothing counts until the next snapshot."""
        if events.epoch != self._epoch:
            return
        gap = self._sequence is not None and events.sequence != self._sequence + 1
        self._sequence = events.sequence
        self._expected = None
        if events.snapshot:
            self._follows = True
        elif gap and self._follows:
            self._follows = False
            self._asked = None  # a new one, whenever the last was asked for
        if not self._follows:
            return
        names, stored = self._names, split_names(events.stored)
        self._predicted.difference_update(stored)
        if events.cleared:
            # A snapshot is all there is: what it lacks of running sequences is about to be told.
            kept = set(stored) if events.snapshot else self._predicted.union(stored)
            self._drop([name for name in names if name not in kept])
        self._drop(split_names(events.removed))
        fresh = [name for name in stored if name not in names]
        names.update(dict.fromkeys(fresh, now))
        if events.snapshot:
            # What is new in a snapshot was not used through this router: it goes first.
            for name in fresh:
                names.move_to_end(name, last=False)
        self._index.add(fresh, self._worker)

    # ---- what the router does ----

    def expect(self, chain: Sequence[bytes], now: float) -> None:
        """A sequence with these blocks goes to the worker."""
        if not self._capacity:
            return
        fresh = [name for name in chain if name not in self._names]
        self._predicted.update(fresh)
        self._use(chain, now)
        self._index.add(fresh, self._worker)
        self._evict(now)

    def computed(self, chain: Sequence[bytes], now: float) -> None:
        """The worker has computed these blocks: it should tell of them."""
        if self._follows and self._expected is None and chain and chain[-1] in self._predicted:
            self._expected = now

    def release(self, chain: Sequence[bytes], now: float, *, computed: bool) -> None:
        """The sequence ended; ``computed``: not before its prompt was. What did not come by then, will not."""
        if not computed or self.state(now) is MirrorState.EXACT:
            self._drop([name for name in chain if name in self._predicted])
        if computed:
            self._use([name for name in chain if name in self._names], now)

    def void(self) -> None:
        """The worker is gone, and its cache with it."""
        self._index.remove(self._names, self._worker)
        self._names.clear()
        self._predicted.clear()
        self._sequence = self._asked = self._expected = None
        self._follows = False

    def _use(self, chain: Sequence[bytes], now: float) -> None:
        names = self._names
        for name in reversed(chain):  # evicted from the end of a prompt, as the worker does it
            names[name] = now
            names.move_to_end(name)

    def _drop(self, gone: Sequence[bytes]) -> None:
        names = self._names
        self._predicted.difference_update(gone)
        for name in gone:
            names.pop(name, None)
        self._index.remove(gone, self._worker)

    def _evict(self, now: float) -> None:
        """Forgets what the worker must have evicted, unless it tells by itself."""
        excess = len(self._names) - self._capacity
        if excess > 0 and self.state(now) is not MirrorState.EXACT:
            self._drop(list(islice(self._names, excess)))


def split_names(packed: bytes) -> list[bytes]:
    """The names in a field of KvEvents."""
    return [packed[start : start + NAME_BYTES] for start in range(0, len(packed), NAME_BYTES)]

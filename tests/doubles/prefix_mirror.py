"""What a router knows of a worker's prefix cache, from KvEvents alone."""

from protos import worker_pb2

NAME_BYTES = 16


class PrefixMirror:
    """Follows the messages of one stream by the rules of protos/worker.proto.

    Attributes:
        names: known on the worker, as far as the messages told; meaningless while ``lost``.
        lost: there was no snapshot yet, or a message is missing since.
    """

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.lost = True
        self.sequence: int | None = None

    def apply(self, events: worker_pb2.KvEvents) -> None:
        assert self.sequence is None or events.sequence > self.sequence, "sequence numbers do not rise"
        gap = self.sequence is not None and events.sequence != self.sequence + 1
        self.sequence = events.sequence
        if events.snapshot:
            assert events.cleared
            self.lost = False
        elif gap:
            self.lost = True
        removed, stored = split(events.removed), split(events.stored)
        assert not removed & stored, "a name was removed and stored"
        if events.cleared:
            self.names.clear()
        if not self.lost:
            assert removed <= self.names, "a name was removed that was not known"
            assert not stored & self.names, "a name was stored that was known"
        self.names -= removed
        self.names |= stored


def split(packed: bytes) -> set[bytes]:
    """The names in a field; each stands there once."""
    names = [packed[start : start + NAME_BYTES] for start in range(0, len(packed), NAME_BYTES)]
    assert all(len(name) == NAME_BYTES for name in names)
    assert len(set(names)) == len(names), "a name stands twice in one field"
    return set(names)

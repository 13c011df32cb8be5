"""KV events: a mirror that hears of them knows the pool's names, whatever happens to pool and stream."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protos.prefix import block_hashes
from tests.doubles.prefix_mirror import PrefixMirror
from worker.block_pool import BlockPool
from worker.kv_event_feed import KvEventFeed
from worker.prefix_changes import PrefixChanges
from worker.sequence import token_array

NUM_BLOCKS = 10
EPOCH = 77
NAMES = [bytes([number]) * 16 for number in range(8)]


def names_of(prompt: list[int]) -> list[bytes]:
    tokens = token_array()
    tokens.extend(prompt)
    return block_hashes(memoryview(tokens).cast("B"), 1)


class Reader:
    """A router: its feed, and what it made of the messages that it read."""

    def __init__(self, max_names: int) -> None:
        self.feed = KvEventFeed(EPOCH, max_names)
        self.mirror = PrefixMirror()
        self.gaps = 0

    def read(self, count: int) -> None:
        while count and self.feed.has_pending:
            lost = self.mirror.lost
            events = self.feed.take()
            assert events.epoch == EPOCH
            assert len(events.stored) + len(events.removed) <= 16 * self.feed._max_names, "a message has no bound"
            self.mirror.apply(events)
            self.gaps += self.mirror.lost > lost
            count -= 1


class EventMachine(RuleBasedStateMachine):
    """Sequences come and go over a small pool; two routers subscribe, read late, fall behind and ask again."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.readers = [Reader(max_names=3), Reader(max_names=1000)]

    def hand_out(self) -> None:
        changes = self.pool.take_changes()
        for reader in self.readers:
            reader.feed.add(changes)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def start(self, prompt):
        names = names_of(prompt)
        found = self.pool.match(names)
        missing = len(names) - len(found)
        if missing <= self.pool.num_available - self.pool.num_unreferenced(found):
            self.pool.share(found)
            blocks = found + self.pool.allocate(missing)
            for block, name in zip(blocks, names, strict=True):
                self.pool.commit([block], [name])
            self.held.append(blocks)

    @rule(data=st.data())
    def end(self, data):
        if self.held:
            self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def clear(self):
        self.pool.clear_cache()

    @rule()
    def step(self):
        self.hand_out()

    @rule(which=st.integers(0, 1))
    def subscribe(self, which):
        if self.readers[which].feed.ask():
            self.hand_out()
            self.pool.record_changes()
            self.readers[which].feed.restart(self.pool.names())

    @rule(which=st.integers(0, 1), count=st.integers(1, 3))
    def read(self, which, count):
        self.readers[which].read(count)

    @rule()
    def everyone_catches_up(self):
        self.hand_out()
        for reader in self.readers:
            reader.read(1000)
            if not reader.mirror.lost:
                assert reader.mirror.names == set(self.pool.names())
        assert not self.readers[1].gaps, "events were lost that there was room for"

    @invariant()
    def whoever_asks_is_told(self):
        for reader in self.readers:
            if reader.feed._follows and not reader.feed.has_pending:
                assert not reader.mirror.lost

    def teardown(self):
        for which in range(2):
            self.subscribe(which)
        self.clear()
        self.start([0, 1, 1])
        self.everyone_catches_up()
        assert not any(reader.mirror.lost for reader in self.readers)


TestEventMachine = EventMachine.TestCase
TestEventMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_nothing_is_noted_while_nobody_listens():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.commit([block], [NAMES[0]])
    assert not pool.take_changes()
    pool.record_changes()
    pool.release([block])
    pool.clear_cache()
    assert pool.take_changes() == PrefixChanges(cleared=True)
    pool.stop_recording()
    pool.commit(pool.allocate(1), [NAMES[1]])
    assert not pool.take_changes()


def test_what_came_and_went_is_not_told():
    changes = PrefixChanges()
    changes.store(NAMES[0])
    changes.remove(NAMES[1])
    later = PrefixChanges()
    later.remove(NAMES[0])
    later.store(NAMES[1])
    changes.extend(later)
    assert not changes


def test_who_falls_behind_gets_a_gap_at_once_and_a_snapshot_when_it_asks():
    feed = KvEventFeed(EPOCH, max_names=2)
    assert feed.ask()
    assert not feed.ask(), "one snapshot is under way"
    feed.restart(NAMES[:1])
    first = feed.take()
    assert (first.snapshot, first.stored, feed.has_pending) == (True, NAMES[0], False)
    feed.add(PrefixChanges(stored=dict.fromkeys(NAMES[1:4])))
    lost = feed.take()
    assert (lost.sequence, lost.stored, lost.snapshot) == (first.sequence + 2, b"", False)
    feed.add(PrefixChanges(stored=dict.fromkeys(NAMES[4:5])))
    assert not feed.has_pending, "it could make nothing of this"
    assert feed.ask()
    feed.restart(NAMES[:5])
    parts = [feed.take() for _ in range(3)]
    assert [part.snapshot for part in parts] == [True, False, False]
    assert b"".join(part.stored for part in parts) == b"".join(NAMES[:5])
    assert [part.sequence for part in parts] == [lost.sequence + step for step in (1, 2, 3)]
    assert not feed.has_pending

"""The mirror of a worker's prefix cache, fed by the worker's own block pool and event feed."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from router.routing.cache_mirror import STALE_S, CacheMirror, MirrorState
from router.routing.prefix_index import PrefixIndex
from tests.doubles.virtual_fleet import events, names
from worker.block_pool import BlockPool
from worker.kv_event_feed import KvEventFeed

A, B, C, D = names(*range(16))


def mirror(capacity: int = 10) -> tuple[PrefixIndex, CacheMirror]:
    index = PrefixIndex()
    return index, CacheMirror(index, 3, capacity, 7)


def test_what_is_on_its_way_counts_and_goes_when_it_never_comes():
    index, cache = mirror()
    cache.apply(events(1, snapshot=True, cleared=True, stored=[A]), 0.0)
    cache.expect([A, B, C], 1.0)
    assert index.match([A, B, C, D]) == {3: 3}
    cache.apply(events(2, stored=[B]), 1.1)
    cache.release([A, B, C], 2.0, computed=True)
    assert index.match([A, B, C, D]) == {3: 2}
    cache.expect([A, B, C, D], 3.0)
    cache.release([A, B, C, D], 3.1, computed=False)
    assert index.match([A, B, C, D]) == {3: 2}


def test_a_gap_degrades_until_the_snapshot_that_is_asked_for_at_once():
    index, cache = mirror()
    assert cache.state(0.0) is MirrorState.APPROXIMATE
    assert cache.ask(0.0)
    assert not cache.ask(0.1), "asked already"
    cache.apply(events(1, snapshot=True, cleared=True, stored=[A, B]), 0.2)
    assert cache.state(0.2) is MirrorState.EXACT
    assert not cache.ask(100.0)
    cache.apply(events(3, removed=[A]), 0.25)
    assert cache.ask(0.25)
    assert cache.state(0.4) is MirrorState.DEGRADED
    cache.apply(events(4, stored=[C]), 0.5)
    assert index.match([A, B, C]) == {3: 2}, "what follows a gap says nothing"
    assert cache.state(0.25 + STALE_S) is MirrorState.APPROXIMATE
    cache.apply(events(5, snapshot=True, cleared=True, stored=[C]), 9.0)
    assert cache.state(9.0) is MirrorState.EXACT
    assert index.match([C]) == {3: 1}
    assert index.match([A]) == {}


def test_silence_about_what_was_computed_makes_it_approximate_until_the_worker_speaks():
    _, cache = mirror()
    cache.apply(events(1, snapshot=True, cleared=True), 0.0)
    assert cache.state(1000.0) is MirrorState.EXACT, "silence while nothing happens is no news"
    cache.expect([A], 1000.0)
    cache.computed([A], 1001.0)
    assert cache.state(1001.0 + STALE_S - 0.1) is MirrorState.EXACT
    assert cache.state(1001.0 + STALE_S) is MirrorState.APPROXIMATE
    assert cache.ask(1001.0 + STALE_S)
    cache.apply(events(2, stored=[A]), 1010.0)
    assert cache.state(1010.0) is MirrorState.EXACT


def test_without_events_it_evicts_as_the_worker_does():
    index, cache = mirror(capacity=3)
    cache.expect([A, B], 1.0)
    cache.release([A, B], 2.0, computed=True)
    assert cache.coldness(5.0) == math.inf, "there is room"
    cache.expect([C, D], 3.0)
    assert index.match([A, B]) == {3: 1}, "the end of a prompt goes before its beginning"
    assert cache.coldness(5.0) == 3.0
    cache.expect([A], 4.0)
    cache.expect([B], 4.5)
    assert index.match([D]) == {}
    assert index.match([C]) == {3: 1}


def test_a_cache_that_keeps_nothing_is_expected_to_keep_nothing():
    index, cache = mirror(capacity=0)
    cache.expect([A], 1.0)
    assert index.match([A]) == {}
    assert not cache.ask(1.0)


def test_a_worker_that_is_gone_leaves_nothing():
    index, cache = mirror()
    cache.apply(events(1, snapshot=True, cleared=True, stored=[A]), 0.0)
    cache.expect([A, B], 1.0)
    index.add([A], 1)
    cache.void()
    assert index.match([A, B]) == {1: 1}
    assert (len(cache), cache.state(2.0)) == (0, MirrorState.APPROXIMATE)


def test_events_of_another_process_are_not_believed():
    index, cache = mirror()
    cache.apply(events(1, snapshot=True, cleared=True, stored=[A], epoch=8), 0.0)
    assert index.match([A]) == {}


class MirrorMachine(RuleBasedStateMachine):
    """Sequences come and go on a worker; messages come late or get lost; the router expects what it sends there."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.feed = KvEventFeed(7, max_names=6)
        self.index, self.cache = mirror(8)
        self.now = 0.0
        self.running: list[tuple[list[int], list[bytes]]] = []
        # A lost message is noticed by the next one.
        self.unnoticed = False

    @rule(head=st.integers(0, 2), tail=st.integers(0, 3), blocks=st.integers(1, 3))
    def start(self, head, tail, blocks):
        chain = names(*[head] * 4, *[tail] * (4 * blocks - 4))
        found = self.pool.match(chain)
        missing = len(chain) - len(found)
        self.cache.expect(chain, self.now)
        if missing > self.pool.num_available - self.pool.num_unreferenced(found):
            self.cache.release(chain, self.now, computed=False)
            return
        self.pool.share(found)
        held = found + self.pool.allocate(missing)
        self.pool.commit(held, chain)
        self.running.append((held, chain))

    @rule(data=st.data())
    def end(self, data):
        if self.running:
            held, chain = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.pool.release(held)
            self.cache.release(chain, self.now, computed=True)

    @rule()
    def clear(self):
        self.pool.clear_cache()

    @rule(lost=st.booleans())
    def tell(self, lost):
        self.feed.add(self.pool.take_changes())
        while self.feed.has_pending:
            message = self.feed.take()
            self.unnoticed = lost
            if not lost:
                self.cache.apply(message, self.now)

    @rule()
    def wait(self):
        self.now += 1.0

    @rule()
    def all_is_known_in_the_end(self):
        for _ in range(3):
            self.now += STALE_S
            self.tell(lost=False)
            if self.cache.ask(self.now) and self.feed.ask():
                self.feed.add(self.pool.take_changes())
                self.pool.record_changes()
                self.feed.restart(self.pool.names())
        self.tell(lost=False)
        if self.cache.state(self.now) is MirrorState.EXACT:
            while self.running:
                held, chain = self.running.pop()
                self.pool.release(held)
                self.cache.release(chain, self.now, computed=True)
            self.tell(lost=False)
            if self.unnoticed:
                return
            told = set(self.pool.names())
            assert {name for name in told if self.index.match([name])} == told
            assert len(self.index) == len(self.cache) == len(told)

    def teardown(self):
        self.all_is_known_in_the_end()


TestMirrorMachine = MirrorMachine.TestCase
TestMirrorMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

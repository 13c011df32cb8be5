"""The block pool's books balance after any sequence of operations, and prefixes are found as long as they are kept."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from worker.block_pool import BlockPool, OutOfBlocks

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share known prefixes, grow and go, in any order."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.references = [0] * NUM_BLOCKS

    @rule(target=held, prompt=st.lists(st.sampled_from("ab"), min_size=1, max_size=5))
    def start(self, prompt):
        names = ["".join(prompt[: end + 1]).encode() for end in range(len(prompt))]
        found = self.pool.match(names)
        missing = len(names) - len(found)
        if missing > self.pool.num_available - self.pool.num_unreferenced(found):
            return multiple()
        self.pool.share(found)
        blocks = found + self.pool.allocate(missing)
        for block, name in zip(blocks, names, strict=True):
            self.references[block] += 1
            self.pool.commit([block], [name])
        assert self.pool.match(names) != [], "a committed prefix is not found"
        return blocks

    @rule(blocks=held)
    def grow(self, blocks):
        if blocks and self.pool.num_available:
            (block,) = self.pool.allocate(1)
            assert self.references[block] == 0, "a block in use was given away"
            self.references[block] += 1
            blocks.append(block)

    @rule(blocks=held)
    def end(self, blocks):
        self.pool.release(blocks)
        for block in blocks:
            self.references[block] -= 1
        blocks.clear()

    @rule()
    def clear(self):
        self.pool.clear_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def balanced(self):
        self.pool.check()
        in_use = sum(count > 0 for count in self.references)
        assert self.pool.num_available == NUM_BLOCKS - in_use


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_allocating_too_much_takes_nothing():
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 of 4 available"):
        pool.allocate(2)
    assert pool.num_available == 1


def test_releasing_twice_is_noticed():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_least_recently_used_prefix_goes_first_and_tail_before_head():
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, name in zip(old + new, (b"old0", b"old1", b"new0", b"new1"), strict=True):
        pool.commit([block], [name])
    pool.release(old)
    pool.release(new)
    pool.allocate(1)
    assert pool.match([b"old0", b"old1"]) == old[:1]
    pool.allocate(1)
    assert pool.match([b"old0"]) == []
    assert pool.match([b"new0", b"new1"]) == new


def test_blank_blocks_are_taken_before_prefixes():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.commit([blocks[0]], [b"kept"])
    pool.release(blocks)
    pool.allocate(2)
    assert pool.match([b"kept"]) == blocks


def test_without_prefix_caching_nothing_is_found():
    pool = BlockPool(2, enable_prefix_caching=False)
    blocks = pool.allocate(1)
    pool.commit([blocks[0]], [b"name"])
    assert pool.match([b"name"]) == []
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (2, 0)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: pool._blank.pop(),  # a leaked block
        lambda pool: pool._blank.append(pool._blank[0]),  # a block that is free twice
        lambda pool: pool._references.__setitem__(pool._blank[0], 1),  # a wrong reference count
        lambda pool: pool._by_name.__setitem__(b"lie", pool._blank[0]),  # a name for another block
    ],
)
def test_check_catches_broken_books(break_it):
    pool = BlockPool(4)
    pool.allocate(1)
    pool.check()
    break_it(pool)
    with pytest.raises(AssertionError):
        pool.check()

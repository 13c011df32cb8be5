"""Accounts for the KV cache's blocks: who refers to a block, which blocks are free, and which hold a known prefix.

Every block is in exactly one state, and after every operation

    free + cached + referenced == total

where a *cached* block has no reference but keeps the keys and values of a named prefix until it is needed for something
else. Free and cached blocks stand in one queue: blocks without content are taken first, then the least recently used.
Knows no tensors: a block is an integer.
"""

from collections import OrderedDict, deque

from worker.prefix_changes import PrefixChanges


class OutOfBlocks(Exception):
    """Fewer blocks are left than asked for."""


class BlockPool:
    """Reference-counted fixed-size blocks, with a prefix cache over the unreferenced ones.

    Args:
        num_blocks: blocks in the cache.
        enable_prefix_caching: without it no block is ever found again.
    """

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._blank: deque[int] = deque(range(num_blocks))
        # Unreferenced blocks with a name, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._changes: PrefixChanges | None = None

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that keep a prefix."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give: free and cached ones."""
        return len(self._blank) + len(self._cached)

    def match(self, names: list[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain of names. Takes no reference."""
        blocks: list[int] = []
        if self.enable_prefix_caching:
            for name in names:
                block = self._by_name.get(name)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def num_unreferenced(self, blocks: list[int]) -> int:
        """How many of these blocks count as available now, and will not once they are shared."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """Takes another reference to each block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks without content, evicting the least recently used prefixes when it must.

        Raises:
            OutOfBlocks: fewer are available; nothing is taken.
        """
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_available} of {self.num_blocks} available")
        references, blank = self._references, self._blank
        blocks = [blank.popleft() for _ in range(min(count, len(blank)))]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            blocks.append(block)
        for block in blocks:
            references[block] = 1
        return blocks

    def commit(self, blocks: list[int], names: list[bytes]) -> None:
        """Makes referenced, full blocks known by their names. The first block of a name stays the known one."""
        if not self.enable_prefix_caching:
            return
        names_of, by_name, changes = self._names, self._by_name, self._changes
        for block, name in zip(blocks, names, strict=True):
            if names_of[block] is None and name not in by_name:
                names_of[block] = name
                by_name[name] = block
                if changes is not None:
                    changes.store(name)

    def release(self, blocks: list[int]) -> None:
        """Gives back one reference to each block of a sequence, whose blocks are in prompt order.

        The tail is queued for eviction before the head: a prefix is of use only as long as all before it is there.
        """
        references, names, cached = self._references, self._names, self._cached
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise AssertionError(f"block {block} was released more often than taken")
            references[block] = left
            if left == 0:
                if names[block] is None:
                    self._blank.append(block)
                else:
                    cached[block] = None

    def clear_cache(self) -> None:
        """Forgets all prefixes. Referenced blocks stay with their sequences."""
        self._blank.extend(self._cached)
        self._cached.clear()
        self._names = [None] * self.num_blocks
        self._by_name.clear()
        if self._changes is not None:
            self._changes.clear()

    def names(self) -> list[bytes]:
        """All names that ``match`` would find, in no order."""
        return list(self._by_name)

    def record_changes(self) -> None:
        """Begins to note which names come and go."""
        if self._changes is None:
            self._changes = PrefixChanges()

    def stop_recording(self) -> None:
        """Notes no more, and forgets what was noted."""
        self._changes = None

    def take_changes(self) -> PrefixChanges:
        """What changed since recording began, or since the last call. Bounded by twice the blocks there are."""
        changes = self._changes
        if not changes:
            return PrefixChanges()
        self._changes = PrefixChanges()
        return changes

    def check(self) -> None:
        """Raises AssertionError when the books do not balance. Linear in the number of blocks: for tests."""
        referenced = sum(references > 0 for references in self._references)
        assert self.num_free + self.num_cached + referenced == self.num_blocks, (
            f"{self.num_free} free + {self.num_cached} cached + {referenced} referenced != {self.num_blocks}"
        )
        assert len(set(self._blank)) == len(self._blank), "a block is free twice"
        for block in self._blank:
            assert self._references[block] == 0, f"block {block} is free and referenced"
            assert self._names[block] is None, f"block {block} is free and has a name"
        for block in self._cached:
            assert self._references[block] == 0, f"block {block} is cached and referenced"
            assert self._names[block] is not None, f"block {block} is cached without a name"
        for name, block in self._by_name.items():
            assert self._names[block] == name, f"block {block} is known by a name that is not its own"

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            self._names[block] = None
            del self._by_name[name]
            if self._changes is not None:
                self._changes.remove(name)

"""Which workers have a block cached: one dictionary from a block's name to the workers, as bits of an integer."""

from collections.abc import Iterable, Sequence


class PrefixIndex:
    """What is known of all workers' prefix caches together. Workers are small integers.

    A prefix is walked from its first block, never searched by bisection: a worker may have lost a block in the middle
    of what it has. The walk costs a quarter of naming the blocks.
    """

    def __init__(self) -> None:
        self._workers: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Names that at least one worker has."""
        return len(self._workers)

    def add(self, names: Iterable[bytes], worker: int) -> None:
        """The worker has these blocks."""
        workers, bit = self._workers, 1 << worker
        for name in names:
            workers[name] = workers.get(name, 0) | bit

    def remove(self, names: Iterable[bytes], worker: int) -> None:
        """The worker has these blocks no more; those that it had not are passed over."""
        workers, others = self._workers, ~(1 << worker)
        for name in names:
            left = workers.get(name, 0) & others
            if left:
                workers[name] = left
            else:
                workers.pop(name, None)

    def match(self, names: Sequence[bytes]) -> dict[int, int]:
        """How many blocks from the start of a chain each worker has, without those that have none."""
        depths: dict[int, int] = {}
        if not names:
            return depths
        get = self._workers.get
        alive = get(names[0], 0)
        for depth, name in enumerate(names):
            still = alive & get(name, 0)
            if still != alive:
                _note(depths, alive & ~still, depth)
                alive = still
            if not alive:
                return depths
        _note(depths, alive, len(names))
        return depths


def _note(depths: dict[int, int], workers: int, depth: int) -> None:
    """Notes the depth of each worker in a set of bits."""
    while workers:
        bit = workers & -workers
        depths[bit.bit_length() - 1] = depth
        workers ^= bit

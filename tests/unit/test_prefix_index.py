"""The prefix index against a set of names for each worker."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.prefix_index import PrefixIndex

NAMES = [bytes([number]) * 16 for number in range(12)]
WORKERS = 5


def depth(known: set[bytes], chain: list[bytes]) -> int:
    for place, name in enumerate(chain):
        if name not in known:
            return place
    return len(chain)


def expected(known: list[set[bytes]], chain: list[bytes]) -> dict[int, int]:
    depths = {worker: depth(names, chain) for worker, names in enumerate(known)}
    return {worker: found for worker, found in depths.items() if found}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, WORKERS - 1), st.lists(st.sampled_from(NAMES), max_size=6)), max_size=30
    ),
    st.lists(st.sampled_from(NAMES), unique=True, max_size=12),
)
def test_matches_are_those_of_each_workers_names(changes, chain):
    index, known = PrefixIndex(), [set() for _ in range(WORKERS)]
    for adds, worker, names in changes:
        if adds:
            index.add(names, worker)
            known[worker].update(names)
        else:
            index.remove(names, worker)
            known[worker].difference_update(names)
    assert index.match(chain) == expected(known, chain)
    assert len(index) == len(set().union(*known))


def test_a_hundred_thousand_random_changes_leave_no_trace_of_error():
    chance = random.Random(0)
    names = [chance.randbytes(16) for _ in range(3000)]
    index, known = PrefixIndex(), [set() for _ in range(70)]  # more workers than a machine word has bits
    for _ in range(20_000):
        worker, start = chance.randrange(70), chance.randrange(2990)
        some = names[start : start + 5]
        if chance.random() < 0.6:
            index.add(some, worker)
            known[worker].update(some)
        else:
            index.remove(some, worker)
            known[worker].difference_update(some)
    for start in range(0, 2900, 50):
        chain = names[start : start + 20]
        assert index.match(chain) == expected(known, chain)
    for worker in range(70):
        index.remove(known[worker], worker)
    assert len(index) == 0

"""The block hash rule is a contract between processes: its values are pinned."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from protos.prefix import block_hashes, chain_root, extend_chain


def pack(ids):
    return array("I", ids).tobytes()


def test_values_are_pinned():
    names = block_hashes(pack(range(32)), 16)
    assert [name.hex() for name in names] == ["8a61b5ecda8dcd81ec022208589f3287", "5bcaae2a19c24c78204f99a24b2322b3"]
    assert block_hashes(pack(range(15)), 16) == []


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100), st.integers(1, 9), st.integers(0, 100))
def test_a_chain_can_be_extended_anywhere(ids, block_size, cut):
    whole = block_hashes(pack(ids), block_size, b"salt")
    assert len(whole) == len(ids) // block_size
    cut = min(cut, len(whole))
    root = chain_root(b"salt")
    parent = whole[cut - 1] if cut else root
    assert whole[:cut] + extend_chain(parent, root, pack(ids[cut * block_size :]), block_size) == whole


@given(st.lists(st.integers(0, 9), min_size=4, max_size=24), st.integers(0, 23))
def test_a_name_depends_on_every_token_before_it(ids, place):
    place %= len(ids) // 4 * 4
    changed = [*ids]
    changed[place] += 10
    before, after = block_hashes(pack(ids), 4), block_hashes(pack(changed), 4)
    block = place // 4
    assert before[:block] == after[:block]
    assert all(a != b for a, b in zip(before[block:], after[block:], strict=True))


def test_salts_share_nothing():
    ids = pack(range(64))
    assert not set(block_hashes(ids, 16)) & set(block_hashes(ids, 16, b"tenant"))

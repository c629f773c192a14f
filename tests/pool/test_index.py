"""The index of keys against a dictionary, with fingerprints that collide and tables that are too small."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.pool import fingerprints
from kvjax.pool.index import KeyIndex


def made(num_slots: int) -> tuple[KeyIndex, np.ndarray]:
    keys = np.empty(num_slots, object)
    return KeyIndex(keys), keys


def prints_of(keys: list[bytes], distinct: int) -> np.ndarray:
    """Fingerprints that many keys share if there are few of them; all lie in the first buckets."""
    return fingerprints(keys) % np.uint64(distinct) + np.uint64(1)


def test_a_key_is_found_in_its_slot_and_others_are_not():
    index, keys = made(4)
    keys[[2, 0]] = [b"a", b"b"]
    index.insert([b"a", b"b"], fingerprints([b"a", b"b"]), np.array([2, 0]))
    asked = [b"b", b"c", b"a"]
    assert index.get(asked, fingerprints(asked)).tolist() == [0, -1, 2]
    assert index.get(tuple(asked), fingerprints(asked)).tolist() == [0, -1, 2]
    assert (len(index), sorted(index.items())) == (2, [(b"a", 2), (b"b", 0)])


def test_nothing_asked_for_is_nothing_found():
    index, _ = made(4)
    assert index.get([], fingerprints([])).tolist() == []


@pytest.mark.parametrize("length", [1, 16, 28, 300])
def test_keys_that_differ_in_trailing_zeros_are_different_keys(length):
    index, keys = made(4)
    names = [bytes(n) for n in range(length, length + 3)]
    keys[[0, 1, 2]] = names
    for slot, name in enumerate(names):
        index.insert([name], fingerprints([name]), np.array([slot]))
    assert index.get(names, fingerprints(names)).tolist() == [0, 1, 2]
    assert keys[:3].tolist() == names


def test_a_fingerprint_depends_on_every_byte_and_not_on_the_keys_beside_it():
    base = bytes(range(28))
    keys = [base] + [base[:n] + b"\xff" + base[n + 1 :] for n in range(28)]
    together = fingerprints(keys)
    assert len(set(together.tolist())) == 29
    assert [int(fingerprints([key])[0]) for key in keys] == together.tolist()
    assert fingerprints([base, b"longer than all the others, and of another length"])[0] == together[0]
    assert fingerprints([b"", b"\0"]).tolist() == [0, 0]


def test_keys_of_all_groups_spread_over_the_buckets():
    """Chunks of one position differ in four bytes, and most of those are zero."""
    index, keys = made(4096)
    names = [bytes(16) + n.to_bytes(4, "little") + b"somewhen" for n in range(4096)]
    keys[:] = names
    index.insert(names, fingerprints(names), np.arange(4096))
    assert len(index._others) < 200


@given(
    st.integers(1, 40),
    st.sampled_from([1, 2, 5, 1000]),
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 60), min_size=1, max_size=12)), max_size=30),
)
def test_it_equals_a_dictionary(num_slots, distinct, steps):
    """A step adds what is not there, as far as there are slots, or removes what is."""
    index, keys = made(num_slots)
    expected: dict[bytes, int] = {}
    free = list(range(num_slots))
    everything = [n.to_bytes(2, "little") for n in range(61)]
    for adds, names in steps:
        some = [everything[n] for n in sorted(names)]
        if adds:
            new = [name for name in some if name not in expected][: len(free)]
            slots = np.array([free.pop() for _ in new], np.int64)
            keys[slots] = new
            index.insert(new, prints_of(new, distinct), slots)
            expected |= dict(zip(new, slots.tolist(), strict=True))
        else:
            gone = np.array([expected.pop(name) for name in some if name in expected], np.int64)
            index.remove(gone)
            free += gone.tolist()
        assert index.get(everything, prints_of(everything, distinct)).tolist() == [
            expected.get(name, -1) for name in everything
        ]
        assert dict(index.items()) == expected
        assert len(index) == len(expected)

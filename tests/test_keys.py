"""Namespaces and keys: the same everywhere, and different whenever bytes could differ."""

import hashlib
import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.chunking import Chunking, resolve_chunking
from kvjax.groups import CacheLayout, FullAttention, GroupSpec, LeafSpec, Recurrent, Scratch, SlidingWindow
from kvjax.keys import (
    HASH_BYTES,
    NAMESPACE_BYTES,
    chunk_key,
    chunk_keys,
    engine_hashes,
    key_group,
    key_hash,
    namespace_of,
    prefix_hashes,
    token_array,
)


def leaves(**changes) -> list[LeafSpec]:
    fields = {"name": "k", "block_shape": (4, 2), "dtype": "bfloat16", "layers": None} | changes
    return [LeafSpec(**fields), LeafSpec("v", (4, 2), "bfloat16")]


def chunking(first: GroupSpec | None = None, *more: GroupSpec, blocks=None, unit=None) -> Chunking:
    """Two groups and a scratch ring, the first of them as given."""
    groups = [first or GroupSpec("a", SlidingWindow(8), 4, leaves()), *more]
    groups += [GroupSpec("ring", Scratch(), 2, block_bytes=8), GroupSpec("b", FullAttention(), 8, block_bytes=64)]
    return resolve_chunking(CacheLayout(groups, tokens_per_hash=unit), blocks_per_chunk=blocks)


def digests() -> dict[str, str | list[str]]:
    """Everything whose value must never depend on the process, as text."""
    cut = chunking()
    namespace = namespace_of(cut, model="gemma", shard="0/2", salt="tenant")
    hashes = prefix_hashes(namespace, range(16), 4)
    return {
        "namespace": namespace.hex(),
        "hashes": [h.hex() for h in hashes],
        "keys": [key.hex() for g in cut.layout.cached for key in chunk_keys(cut, g, hashes, namespace)],
        "engine": [h.hex() for h in engine_hashes(namespace, [b"\x01", 1, -1, 2**64])],
    }


GOLDEN = {
    "namespace": "2d26e49e6fccd6edd82004aab50fb7a1",
    "hashes": [
        "2a7d9254b8d428a251384a3aadd0ce5e",
        "94b044500df7833198e669cdf46e5cc2",
        "3cc021a328083bfee2baa84380a68e55",
        "2a8213d8b2fab5b0ba11e2ffd65e5303",
    ],
    "keys": [
        "2a7d9254b8d428a251384a3aadd0ce5e000000002d26e49e6fccd6ed",
        "94b044500df7833198e669cdf46e5cc2000000002d26e49e6fccd6ed",
        "3cc021a328083bfee2baa84380a68e55000000002d26e49e6fccd6ed",
        "2a8213d8b2fab5b0ba11e2ffd65e5303000000002d26e49e6fccd6ed",
        "94b044500df7833198e669cdf46e5cc2020000002d26e49e6fccd6ed",
        "2a8213d8b2fab5b0ba11e2ffd65e5303020000002d26e49e6fccd6ed",
    ],
    "engine": [
        "004f06017c3d493ea7e3f64979c5289c",
        "d986a9be05e38904e38fd6fcfa23de61",
        "1c22d8103a9259b74801c3e28cb3a7ce",
        "0a13d75ea6608d0ef13c9505270bde7b",
    ],
}


def test_digests_have_not_changed():
    """A stored cache is found again by these values: changing one makes every older file a miss."""
    assert digests() == GOLDEN


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_digests_are_the_same_in_every_process(seed):
    code = "import json; from tests.test_keys import digests; print(json.dumps(digests()))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == digests()


# --- namespaces


def test_a_namespace_depends_on_every_field_that_gives_bytes_their_meaning():
    """Pages of one size and another meaning (bf16 read as fp16, another order of axes, another shard) must not meet."""
    plain = GroupSpec("a", SlidingWindow(8), 4, leaves())
    changed = [
        chunking(GroupSpec("c", SlidingWindow(8), 4, leaves())),
        chunking(GroupSpec("a", SlidingWindow(9), 4, leaves())),
        chunking(GroupSpec("a", FullAttention(), 4, leaves())),
        chunking(GroupSpec("a", Recurrent(), 4, leaves())),
        chunking(GroupSpec("a", SlidingWindow(8), 12, leaves())),
        chunking(GroupSpec("a", SlidingWindow(8), 4, leaves(), lookahead_tokens=1)),
        chunking(GroupSpec("a", SlidingWindow(8), 4, leaves()[::-1])),
        chunking(GroupSpec("a", SlidingWindow(8), 4, leaves(name="key"))),
        chunking(GroupSpec("a", SlidingWindow(8), 4, leaves(dtype="float16"))),
        chunking(GroupSpec("a", SlidingWindow(8), 4, leaves(block_shape=(2, 4)))),
        chunking(GroupSpec("a", SlidingWindow(8), 4, leaves(block_shape=(8,)))),
        chunking(GroupSpec("a", SlidingWindow(8), 4, leaves(layers=1))),
        chunking(GroupSpec("a", SlidingWindow(8), 4, block_bytes=32)),
        chunking(GroupSpec("a", SlidingWindow(8), 4, block_bytes=33)),
        chunking(blocks=2),
        chunking(blocks={"a": 3}),
        chunking(unit=2),
        chunking(plain, GroupSpec("a2", FullAttention(), 4, block_bytes=64)),
    ]
    found = [namespace_of(cut) for cut in [chunking(plain), *changed]]
    found += [namespace_of(chunking(), **field) for field in ({"model": "m"}, {"shard": "m"}, {"salt": "m"})]
    assert len(set(found)) == len(found)
    assert {len(namespace) for namespace in found} == {HASH_BYTES}


def test_what_is_only_displayed_has_no_part_in_a_namespace():
    shown = GroupSpec("a", SlidingWindow(8), 4, leaves(), num_layers=7)
    assert namespace_of(chunking(shown)) == namespace_of(chunking())


def test_fields_are_tagged_so_that_neighbours_do_not_run_together():
    cut = chunking()
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", "")]
    assert len({namespace_of(cut, model=model, shard=shard) for model, shard in pairs}) == len(pairs)


def test_a_salt_of_bytes_is_never_that_of_a_string():
    """Bytes taken as they are, next to strings tagged "str:", would let one tenant's salt spell another's."""
    cut = chunking()
    salts = ["a", b"a", b"str:a", "str:a", b"bytes:a", "bytes:a", "", b""]
    assert len({namespace_of(cut, salt=salt) for salt in salts}) == len(salts)


def test_texts_of_a_namespace_must_be_texts():
    cut = chunking()
    with pytest.raises(ValueError, match="`model` must be a string, got 3"):
        namespace_of(cut, model=3)  # pyright: ignore
    with pytest.raises(ValueError, match="`shard` must be a string, got None"):
        namespace_of(cut, shard=None)  # pyright: ignore
    with pytest.raises(ValueError, match=r"`salt` must be a string or bytes, got 1.5"):
        namespace_of(cut, salt=1.5)  # pyright: ignore


# --- prefix hashes


NAMESPACE = namespace_of(chunking())


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 5), st.integers(0, 8))
def test_hashing_in_two_parts_equals_hashing_at_once(tokens, unit, units_first):
    whole = prefix_hashes(NAMESPACE, tokens, unit)
    assert len(whole) == len(tokens) // unit
    first = prefix_hashes(NAMESPACE, tokens[: units_first * unit], unit)
    rest = tokens[units_first * unit :]
    assert first == whole[:units_first]
    assert first + prefix_hashes(NAMESPACE, rest, unit, previous=first[-1] if first else None) == whole


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 7))
def test_a_changed_token_changes_its_hash_and_all_later_ones(tokens, place):
    other = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    for at, (a, b) in enumerate(
        zip(prefix_hashes(NAMESPACE, tokens, 2), prefix_hashes(NAMESPACE, other, 2), strict=True)
    ):
        assert (a == b) == (at < place // 2)


def test_a_hash_is_keyed_with_the_one_before():
    first, second = prefix_hashes(NAMESPACE, [1, 2, 3, 4], 2)
    assert first == hashlib.blake2b(struct.pack("<2q", 1, 2), digest_size=16, key=NAMESPACE).digest()
    assert second == hashlib.blake2b(struct.pack("<2q", 3, 4), digest_size=16, key=first).digest()


def test_hashes_depend_on_the_namespace_and_on_what_came_before():
    again = prefix_hashes(NAMESPACE, [1, 2, 1, 2], 2)
    assert len({*again, *prefix_hashes(b"other", [1, 2, 1, 2], 2)}) == 4
    assert {len(h) for h in again} == {HASH_BYTES}


def test_the_type_that_holds_the_tokens_does_not_matter():
    tokens = [1, 2, 70_000, 5]
    made = [np.array(tokens, dtype) for dtype in (np.int32, np.int64, np.uint32, np.uint64, ">i4", ">i8")]
    expected = prefix_hashes(NAMESPACE, tokens, 2)
    for given_tokens in (*made, tuple(tokens), np.array([[t, 0] for t in tokens])[:, 0]):
        assert prefix_hashes(NAMESPACE, given_tokens, 2) == expected


@pytest.mark.parametrize("tokens", [[1.0], "12", b"12", 5, None, [[1, 2]], [True, False], ["1"], np.zeros((2, 2), int)])
def test_tokens_must_be_a_sequence_of_ints(tokens):
    with pytest.raises(ValueError, match="`token_ids` must be a 1-d sequence of ints, got "):
        prefix_hashes(NAMESPACE, tokens, 2)


def test_no_tokens_are_no_hashes():
    assert prefix_hashes(NAMESPACE, [], 4) == []
    assert token_array([]).dtype == np.int64


@pytest.mark.parametrize("unit", [0, -1, 2.0, True])
def test_a_hash_unit_must_be_a_positive_int(unit):
    with pytest.raises(ValueError, match="`tokens_per_hash` must be a positive int, got "):
        prefix_hashes(NAMESPACE, [1, 2], unit)


# --- an engine's own hashes


def test_an_engines_hashes_are_bound_to_the_namespace():
    values = [b"\x01", b"\x01\x00", b"", 1, -1, 0, 255, 256, 2**64, b"i\x01", b"1"]
    bound = engine_hashes(NAMESPACE, values)
    assert len({*bound, *engine_hashes(b"other", values)}) == 2 * len(values)
    assert engine_hashes(NAMESPACE, [np.int64(255), bytearray(b"\x01")]) == [bound[6], bound[0]]
    assert {len(h) for h in bound} == {HASH_BYTES}


@pytest.mark.parametrize("value", ["a", 1.5, None, True, [1]])
def test_an_engines_hashes_must_be_bytes_or_ints(value):
    with pytest.raises(ValueError, match="`hashes` must hold bytes or ints, got "):
        engine_hashes(NAMESPACE, [b"", value])


# --- keys


def test_a_key_is_the_prefix_hash_at_the_chunks_last_token():
    cut = chunking(blocks={"a": 2})
    hashes = prefix_hashes(NAMESPACE, range(20), 4)
    assert cut.hashes_per_chunk == (2, None, 2)
    assert [key[:HASH_BYTES] for key in chunk_keys(cut, 0, hashes, NAMESPACE)] == [hashes[1], hashes[3]]
    assert chunk_keys(cut, 0, hashes[:1], NAMESPACE) == []


@given(st.integers(0, 12), st.integers(1, 4), st.integers(0, 5))
def test_keys_from_a_later_chunk_on_are_a_tail_of_all_keys(num_hashes, blocks, first):
    cut = chunking(blocks={"a": blocks})
    hashes = prefix_hashes(NAMESPACE, range(num_hashes * 4), 4)
    every = chunk_keys(cut, 0, hashes, NAMESPACE)
    assert len(every) == num_hashes // blocks
    assert chunk_keys(cut, 0, hashes, NAMESPACE, first_chunk=first) == every[first:]


def test_the_same_hash_in_two_groups_is_two_keys():
    """One block hash, groups 0 and 2 of one layout: without the group in the key, one group's bytes serve the other."""
    cut = chunking(blocks={"a": 2})
    hashes = prefix_hashes(NAMESPACE, range(16), 4)
    first, second = (chunk_keys(cut, g, hashes, NAMESPACE) for g in (0, 2))
    assert [a[:HASH_BYTES] for a in first] == [b[:HASH_BYTES] for b in second]
    assert set(first).isdisjoint(second)
    assert [key_group(key) for key in first + second] == [0, 0, 2, 2]


def test_a_key_is_made_of_its_hash_its_group_and_its_namespace():
    cut = chunking()
    (key,) = chunk_keys(cut, 0, prefix_hashes(NAMESPACE, range(4), 4), NAMESPACE)
    assert key == chunk_key(key_hash(key), key_group(key), NAMESPACE)
    assert key[-NAMESPACE_BYTES:] == NAMESPACE[:NAMESPACE_BYTES]


def test_the_type_of_integers_is_no_part_of_a_key():
    namespace = bytes(16)
    wanted = prefix_hashes(namespace, list(range(9)), 4)
    for dtype in (np.int32, np.uint32, np.int64, np.uint64, np.uint8):
        assert prefix_hashes(namespace, np.arange(9, dtype=dtype), 4) == wanted

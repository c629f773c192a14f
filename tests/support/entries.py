"""Entries of made-up chunks, with frames as kvjax writes them."""

import time
from dataclasses import dataclass

import numpy as np

from kvjax.keys import HASH_BYTES, NAMESPACE_BYTES, chunk_key
from kvjax.tiers.entries import EntryName
from kvjax.tiers.frame import entry_bytes, write_header

NAMESPACE = bytes(range(HASH_BYTES))
OTHER_NAMESPACE = bytes(range(100, 100 + HASH_BYTES))
LONG_S = 60.0  # nothing in a test comes near it, unless something hangs


@dataclass(frozen=True)
class Entry:
    """A name and the bytes that belong to it."""

    name: EntryName
    frame: bytes


def name_of(seed: int, payload_bytes: int, *, namespace: bytes = NAMESPACE, group_idx: int = 0) -> EntryName:
    """The name of a made-up chunk; another seed is another chunk."""
    digest = np.random.default_rng(seed).bytes(HASH_BYTES)
    key = chunk_key(digest, group_idx, namespace[:NAMESPACE_BYTES])
    return EntryName(namespace, key, entry_bytes(payload_bytes))


def entry(seed: int, payload_bytes: int = 1000, *, namespace: bytes = NAMESPACE, group_idx: int = 0) -> Entry:
    """A made-up chunk, of random bytes."""
    name = name_of(seed, payload_bytes, namespace=namespace, group_idx=group_idx)
    return Entry(name, frame_of(name, np.random.default_rng([seed, payload_bytes]).bytes(payload_bytes)))


def frame_of(name: EntryName, payload: bytes) -> bytes:
    """The frame around a chunk's bytes."""
    frame = bytearray(entry_bytes(len(payload)))
    frame[-len(payload) :] = payload
    write_header(memoryview(frame), name, group_name="global", chunk_idx=3, tokens_per_chunk=16)
    return bytes(frame)


def later(seconds: float = LONG_S) -> float:
    """A deadline that is so far away."""
    return time.monotonic() + seconds

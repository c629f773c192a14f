"""Three small layouts, and what tests of the ledger ask of an engine again and again."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvjax import FullAttention, Recurrent, Scratch, SlidingWindow
from kvjax.chunking import Chunking
from kvjax.keys import chunk_keys, prefix_hashes
from kvjax.pool import ChunkPool
from tests.oracles.layouts import Pick, cut, group
from tests.support.fake_engine import FakeEngine

UNIFORM = cut(group("full", FullAttention(), 4))
MIXED = cut(group("full", FullAttention(), 4), group("ring", Scratch(), 2), group("window", SlidingWindow(8), 4))
HYBRID = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 8))
CHUNK = 64  # bytes of every chunk of these


def engine(chunking: Chunking = MIXED, chunks: int = 1000, **options: Any) -> FakeEngine:
    return FakeEngine(chunking, num_units=chunks * CHUNK, **options)


def resident(served: FakeEngine, tokens: list[int]) -> dict[str, list[int]]:
    """The chunks of a prompt that a lookup would find, by group. Is no access."""
    chunking, namespace = served.chunking, served.ledger.namespace()
    hashes = prefix_hashes(namespace, tokens, chunking.tokens_per_hash)
    keys = {g: chunk_keys(chunking, g, hashes, namespace) for g in chunking.layout.cached}
    return {chunking.layout.names[g]: np.flatnonzero(served.ledger.pool.find(k) >= 0).tolist() for g, k in keys.items()}


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def picks() -> st.SearchStrategy[Pick]:
    """What the random layouts are made from, drawn by hypothesis."""
    return st.builds(lambda data: lambda low, high: data.draw(st.integers(low, high)), st.data())


def clear_away(pool: ChunkPool) -> None:
    """Lets the pool clear away what was invalidated, as the calls of a running engine do by and by."""
    for _ in range(1 + pool.num_units):
        before = pool.num_free_units
        nothing = pool.prepare_store([], [])
        assert nothing is not None
        pool.complete_store(nothing, ok=True)
        if pool.num_free_units == before:
            return

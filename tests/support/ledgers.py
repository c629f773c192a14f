"""Three small layouts, and what tests of the ledger ask of an engine again and again."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvjax import FullAttention, Recurrent, Scratch, SlidingWindow
from kvjax.chunking import Chunking
from kvjax.requests import Request
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
    request = Request(served.ledger.namespace())
    request.extend(served.chunking, tokens, None, None)
    return {
        served.chunking.layout.names[g]: np.flatnonzero(served.ledger.pool.find(keys) >= 0).tolist()
        for g, keys in request.keys.items()
    }


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def picks() -> st.SearchStrategy[Pick]:
    """What the random layouts are made from, drawn by hypothesis."""
    return st.builds(lambda data: lambda low, high: data.draw(st.integers(low, high)), st.data())

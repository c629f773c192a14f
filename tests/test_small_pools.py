"""Host pools smaller than a single request: what fits is stored, and that the rest is not is told."""

import logging

import pytest

from tests.support.ledgers import HYBRID, MIXED, UNIFORM, engine, prompt


@pytest.mark.parametrize(
    ("chunking", "chunks", "hit"), [(UNIFORM, 3, 12), (MIXED, 5, 12), (HYBRID, 4, 8), (MIXED, 1, 0)]
)
def test_what_no_pool_of_this_size_could_hold_is_counted_and_logged_once(caplog, chunking, chunks, hit):
    served = engine(chunking, chunks)
    with caplog.at_level(logging.WARNING, logger="kvjax.storing"):
        for name in ("a", "b"):
            served.served(name, prompt(41), step=4)
    assert served.start("again", prompt(42)).hit_tokens == hit
    assert served.ledger.pool.counts.refused >= 2
    assert caplog.messages == [
        f"the host pool is too small for a request of 41 tokens: of such requests it holds the first {hit} at most"
    ]


@pytest.mark.parametrize("chunking", [UNIFORM, MIXED, HYBRID])
def test_nothing_is_told_where_all_fits(caplog, chunking):
    served = engine(chunking, 16, checkpoint_tokens=8)
    for name in ("a", "b"):
        served.served(name, prompt(41), step=5)
    assert served.ledger.pool.counts.refused == 0
    assert caplog.messages == []

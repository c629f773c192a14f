"""Host pools smaller than a single request: what fits is stored, and that the rest is not is told."""

import jax.numpy as jnp
import pytest

import kvjax
from tests.support.ledgers import HYBRID, MIXED, UNIFORM, engine, prompt


@pytest.mark.parametrize(
    ("chunking", "chunks", "hit"), [(UNIFORM, 3, 12), (MIXED, 5, 12), (HYBRID, 4, 8), (MIXED, 1, 0)]
)
def test_what_no_pool_of_this_size_could_hold_is_counted_and_told(chunking, chunks, hit):
    served = engine(chunking, chunks)
    for name in ("a", "b"):
        served.served(name, prompt(41), step=4)
    assert served.start("again", prompt(42)).hit_tokens == hit
    assert served.ledger.counts.stores_too_large >= 2
    assert served.ledger.too_small == (
        f"the host pool is too small for a request of 41 tokens: of such requests it holds the first {hit} at most"
    )


@pytest.mark.parametrize("chunking", [UNIFORM, MIXED, HYBRID])
def test_nothing_is_told_where_all_fits(chunking):
    served = engine(chunking, 16, checkpoint_tokens=8)
    for name in ("a", "b"):
        served.served(name, prompt(41), step=5)
    assert served.ledger.counts.stores_too_large == 0
    assert served.ledger.too_small == ""


def test_an_offloader_says_it_once_and_counts_it_each_time(caplog):
    leaf = kvjax.LeafSpec("kv", (8, 16), "float32")
    layout = kvjax.CacheLayout([kvjax.GroupSpec("full", kvjax.FullAttention(), 8, [leaf])])
    caches, tables = {"kv": jnp.zeros((8, 8, 16))}, {"full": range(6)}
    offloader = kvjax.Offloader(layout, caches, host_bytes=2 * 512, show_progress=False)
    for name in ("a", "b"):
        offloader.lookup(name, prompt(40))
        caches, job = offloader.store(caches, name, tables, 40)
        offloader.wait(job)
        offloader.finish(name)
    assert offloader.lookup("again", prompt(40)).hit_tokens == 16
    assert offloader.stats().refused_stores == 2
    assert caplog.messages == [
        "the host pool is too small for a request of 40 tokens: of such requests it holds the first 16 at most"
    ]
    offloader.close()

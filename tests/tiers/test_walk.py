"""Random walks over an offloader with tiers; `python -m tests.benchmarks.tiered_walks` takes longer ones."""

import pytest

from tests.support.tiered_walk import TieredWalk

WALKS = [(1, "direct", 4000, "through"), (2, "direct", 400, "back"), (3, "staged", 2000, "back")]


@pytest.mark.parametrize(("seed", "transfer", "host_bytes", "write"), WALKS)
def test_every_byte_is_right_whatever_tiers_do(seed, transfer, host_bytes, write):
    walk = TieredWalk(seed, transfer=transfer, host_bytes=host_bytes, write=write)
    walk.walk(250)
    assert walk.seen["promoted"] > 0
    assert walk.seen["faults"] > 0

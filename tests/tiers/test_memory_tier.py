"""The tier that tests use keeps to what every tier must do."""

import pytest

from kvjax.tiers import TierFullError
from tests.support.entries import entry, later
from tests.support.tiers import MemoryTier
from tests.tiers.conformance import TierConformance, exists, get, put, result


class TestMemoryTier(TierConformance):
    @pytest.fixture
    def make(self):
        return MemoryTier

    def reopen(self, tier):
        tier.close()
        return MemoryTier(entries=tier.entries)


class TestSmallMemoryTier(TierConformance):
    """It has room for 8 MiB, and drops what was longest not used."""

    @pytest.fixture
    def make(self):
        return lambda: MemoryTier(max_bytes=8 * 2**20)

    def reopen(self, tier):
        tier.close()
        return MemoryTier(entries=tier.entries, max_bytes=tier.max_bytes)


def test_what_was_longest_not_read_makes_room():
    entries = [entry(seed) for seed in range(4)]
    tier = MemoryTier(max_bytes=3 * len(entries[0].frame))
    put(tier, entries[:3])
    get(tier, entries[0].name)
    put(tier, entries[3:])
    assert exists(tier, [one.name for one in entries]) == [True, False, True, True]
    big = entry(9, 10_000)
    with pytest.raises(TierFullError, match="10128 bytes"):
        result(tier.put([big.name], [memoryview(big.frame)], deadline=later())[0])
    tier.close()

"""The tier on a folder keeps to what every tier must do."""

import itertools

import pytest

from kvjax.tiers import open_tier
from tests.tiers.conformance import TierConformance


class TestFileTier(TierConformance):
    @pytest.fixture
    def make(self, tmp_path):
        numbers = itertools.count()
        return lambda: open_tier(f"file://{tmp_path}/{next(numbers)}")

    def reopen(self, tier):
        tier.close()
        return open_tier(tier.name)

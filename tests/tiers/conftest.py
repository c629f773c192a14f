"""A loaded machine must not turn what a tier has into a miss."""

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Lookups ask tiers for as long as it takes."""
    monkeypatch.setattr("kvjax.tiers.flow._ASKED_FOR_S", 30.0)

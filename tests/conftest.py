import os

import jax
import pytest
from hypothesis import settings

# On a developer's machine each run tries new examples; in CI the same ones, so that a red run is about the change.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

_COMPILED: list[str] = []


def _note(event: str, *_: object, **__: object) -> None:
    if event.endswith("backend_compile_duration"):
        _COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)


@pytest.fixture
def compilations() -> list[str]:
    """One entry for every program that XLA compiled since the list was last cleared."""
    return _COMPILED

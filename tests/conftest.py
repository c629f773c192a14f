import jax
import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.load_profile("default")

_COMPILED: list[str] = []


def _note(event: str, *_: object, **__: object) -> None:
    if event.endswith("backend_compile_duration"):
        _COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)


@pytest.fixture
def compilations() -> list[str]:
    """One entry for every program that XLA compiled since the list was last cleared."""
    return _COMPILED

import os

# Where compilers for accelerators are installed, JAX would look for their devices, and say what it does not find.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Tests of meshes need several devices; all others use the first of them.
_EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT_DEVICES}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

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

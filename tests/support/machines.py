"""How long the stateful machines run: `KVJAX_MACHINE_EXAMPLES=5000 pytest tests` for a long one."""

import os

from hypothesis import settings


def machine_settings(examples: int, steps: int) -> settings:
    """Settings of a machine, with as many examples as the environment says or `examples`."""
    return settings(
        max_examples=int(os.environ.get("KVJAX_MACHINE_EXAMPLES", examples)),
        stateful_step_count=steps,
        deadline=None,
    )

"""The one loop that chooses an implementation of an operation."""

from collections.abc import Callable, Mapping
from typing import Any

import jax


def dispatch(
    operation: str,
    implementations: Mapping[str, Callable[..., Any]],
    *args: Any,
    platform: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Runs the first implementation that takes the arguments.

    An implementation is called as `f(*args, platform=platform)`. It raises `NotImplementedError` with the
    reason, before it does anything else, if it cannot take these arguments on this platform.

    Args:
        operation: name of the operation, for messages.
        implementations: the implementations by name, in the order in which they are tried.
        *args: arguments of the operation, which the caller has checked.
        platform: platform the program is made for (`"cpu"`, `"gpu"`, `"tpu"`); `None` is the default backend.
        implementation: name of the only implementation to try; `None` tries all.

    Returns:
        What the implementation returns.

    Raises:
        ValueError: no implementation has the name `implementation`.
        NotImplementedError: the implementation of that name cannot take the arguments.
        ExceptionGroup: every implementation refused; it holds each one's `NotImplementedError`, in order.
    """
    if platform is None:
        platform = jax.default_backend()
    if implementation is not None:
        if implementation not in implementations:
            names = ", ".join(f"`{name}`" for name in implementations)
            raise ValueError(f"`implementation` of `{operation}` must be one of {names}, got {implementation!r}")
        return implementations[implementation](*args, platform=platform)
    refusals: dict[str, NotImplementedError] = {}
    for name, function in implementations.items():
        try:
            return function(*args, platform=platform)
        except NotImplementedError as refusal:
            refusal.add_note(f"implementation `{name}` of `{operation}`")
            refusals[name] = refusal
    reasons = "; ".join(f"`{name}`: {refusal}" for name, refusal in refusals.items())
    raise ExceptionGroup(
        f"no implementation of `{operation}` takes these arguments on {platform!r} ({reasons})",
        list(refusals.values()),
    )

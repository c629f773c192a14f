"""Programs that run on every device that holds the caches, each on its own part."""

from collections.abc import Callable
from typing import Any

import jax

from kvjax.memory.registration import RegisteredCaches


def on_each_device(
    function: Callable[..., Any], caches: RegisteredCaches, inputs: tuple[int | None, ...], outputs: Any
) -> Callable[..., Any]:
    """Makes a function of one device's parts one of whole arrays.

    Args:
        function: what each device does, of arguments as `inputs` says.
        caches: the registered arrays.
        inputs: for each argument, the index of the group whose leaves it is, or `None` for an array whose first
            dimension is split evenly over the devices.
        outputs: the same of the results, one or a tuple.
    """
    if caches.mesh is None:
        return function

    def spec(argument: int | None) -> Any:
        if argument is None:
            return caches.over_all_axes
        return tuple(leaf.sharding.spec for leaf in caches.leaves_of(argument))  # pyright: ignore[reportAttributeAccessIssue]

    return jax.shard_map(
        function,
        mesh=caches.mesh,
        in_specs=tuple(spec(argument) for argument in inputs),
        out_specs=tuple(spec(result) for result in outputs) if isinstance(outputs, tuple) else spec(outputs),
        check_vma=False,
    )


def compiled(
    function: Callable[..., Any], args: tuple[Any, ...], donate: tuple[int, ...], out_shardings: Any
) -> Callable[..., Any]:
    """Compiles a function for arrays like `args`. The program takes other objects of equivalent shardings, too."""
    return jax.jit(function, donate_argnums=donate, out_shardings=out_shardings).lower(*args).compile()

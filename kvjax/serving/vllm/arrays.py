"""The runner's caches, as leaves: tpu-inference keeps a list with an array, or a tuple of states, for each layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from kvjax.groups import LeafSpec
from kvjax.serving.vllm.layout import VllmGroup


def flattened(kv_caches: Sequence[Any]) -> dict[str, jax.Array]:
    """Returns the arrays by leaf name: `3` for the array at place 3 of the list, `3.0` and on for a tuple's."""
    leaves = {}
    for place, cache in enumerate(kv_caches):
        if isinstance(cache, (tuple, list)):
            leaves |= {f"{place}.{part}": array for part, array in enumerate(cache)}
        else:
            leaves[str(place)] = cache
    return leaves


def unflattened(kv_caches: Sequence[Any], leaves: Mapping[str, jax.Array]) -> list[Any]:
    """Returns a list as `kv_caches` is one, with the arrays of `leaves`."""
    return [
        type(cache)(leaves[f"{place}.{part}"] for part in range(len(cache)))
        if isinstance(cache, (tuple, list))
        else leaves[str(place)]
        for place, cache in enumerate(kv_caches)
    ]


def leaves_of(
    groups: Sequence[VllmGroup], kv_caches: Sequence[Any], layer_places: Mapping[str, int]
) -> dict[str, list[LeafSpec]]:
    """Returns the leaves of each group, by its name, in the order of the list.

    Layers of several groups may have the same array: their blocks have distinct ids.

    Args:
        groups: the groups.
        kv_caches: the runner's list.
        layer_places: where in it each layer's cache is.

    Raises:
        ValueError: a layer without a place, or an array that is no group's.
    """
    arrays = flattened(kv_caches)
    found: dict[str, list[LeafSpec]] = {}
    for group in groups:
        missing = [name for name in group.layer_names if name not in layer_places]
        if missing:
            raise ValueError(f"the runner must have a cache for each layer, got none for {missing[0]!r}")
        places = sorted({layer_places[name] for name in group.layer_names})
        found[group.name] = [
            LeafSpec(name, array.shape[1:], array.dtype)
            for name, array in arrays.items()
            if int(name.split(".")[0]) in places
        ]
    unclaimed = sorted(set(arrays) - {leaf.name for leaves in found.values() for leaf in leaves})
    if unclaimed:
        raise ValueError(f"every array of the runner must belong to a group's layers, got others at {unclaimed}")
    return found

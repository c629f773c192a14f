"""Caches of layers → groups of a layout."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvjax._checks import integer, shown
from kvjax.groups import CacheLayout, ChunkedLocal, GroupSpec, LeafSpec, Recurrent, Scratch, SlidingWindow
from kvjax.models.caches import LayerCache


@dataclass(frozen=True, slots=True)
class Bucket:
    """Caches that are alike: one kind, window, tokens per state and shape.

    Args:
        name: of the group.
        caches: one for each layer and place in it, in layer order.
    """

    name: str
    caches: tuple[LayerCache, ...]

    @property
    def one(self) -> LayerCache:
        """Any of them."""
        return self.caches[0]

    @property
    def num_layers(self) -> int:
        """Caches in it; a layer with two attentions counts twice."""
        return len(self.caches)


def buckets(caches: Iterable[LayerCache], prefix: str = "") -> list[Bucket]:
    """Returns the caches by what they are, in the order of their first layers, each with a name of its own."""
    alike: dict[tuple[object, ...], list[LayerCache]] = {}
    for cache in caches:
        alike.setdefault(cache.shape, []).append(cache)
    found = [Bucket(prefix + members[0].role, tuple(members)) for members in alike.values()]
    return _distinct(found)


def _distinct(found: list[Bucket]) -> list[Bucket]:
    """Adds to names that occur twice what tells them apart: the window, the tokens per state, the width, a number."""
    for suffix in (_window, _ratio, _width):
        alike: dict[str, set[str]] = {}
        for one in found:
            alike.setdefault(one.name, set()).add(suffix(one))
        clash = {name for name, suffixes in alike.items() if len(suffixes) > 1}
        found = [replace(one, name=one.name + suffix(one)) if one.name in clash else one for one in found]
    taken: dict[str, int] = {}
    numbered = []
    for bucket in found:
        taken[bucket.name] = taken.get(bucket.name, 0) + 1
        count = taken[bucket.name]
        numbered.append(bucket if count == 1 else replace(bucket, name=f"{bucket.name}_{count}"))
    return numbered


def _window(bucket: Bucket) -> str:
    match bucket.one.kind:
        case SlidingWindow(window_tokens):
            return f"_{window_tokens}"
        case ChunkedLocal(chunk_tokens):
            return f"_{chunk_tokens}"
    return ""


def _ratio(bucket: Bucket) -> str:
    return f"_{bucket.one.tokens_per_state}" if bucket.one.tokens_per_state > 1 else ""


def _width(bucket: Bucket) -> str:
    return "_" + "_".join("x".join(map(str, array.shape)) for array in bucket.one.arrays)


def tokens_of_blocks(found: list[Bucket], tokens_per_block: Any) -> list[int]:
    """Returns the tokens per block of each bucket: as asked for, rounded up to whole states.

    Raises:
        ValueError: `tokens_per_block` is neither a positive int nor a mapping from group names to such.
    """
    names = [bucket.name for bucket in found]
    if isinstance(tokens_per_block, Mapping):
        for name in tokens_per_block:
            if name not in names:
                raise ValueError(f"`tokens_per_block` must name groups of the model {names}, got {shown(name)}")
        asked = {
            name: integer(tokens, f"tokens_per_block of group {name!r}", at_least=1)
            for name, tokens in tokens_per_block.items()
        }
    else:
        asked = dict.fromkeys(names, integer(tokens_per_block, "tokens_per_block", at_least=1))
    result = []
    for bucket in found:
        one = bucket.one
        wanted = one.block_tokens or asked.get(bucket.name, 16)
        states = 1 if isinstance(one.kind, Recurrent) else one.tokens_per_state
        result.append(-(-wanted // states) * states)
    return result


def group(bucket: Bucket, tokens_per_block: int, name: str | None = None) -> GroupSpec:
    """Returns the group of a bucket, with a leaf for each array of each layer."""
    one = bucket.one
    leaves = []
    occurrences: dict[int, int] = {}
    for cache in bucket.caches:
        place = occurrences.get(cache.layer, 0)
        occurrences[cache.layer] = place + 1
        part = f"layers.{cache.layer}" + (f".{place}" if place else "")
        for array in cache.arrays:
            if isinstance(one.kind, Recurrent):
                shape = array.shape
            else:
                shape = (tokens_per_block // one.tokens_per_state, *array.shape)
            leaves.append(LeafSpec(f"{part}.{_leaf_part(one, array.name)}", shape, array.dtype))
    return GroupSpec(
        name or bucket.name,
        one.kind,
        tokens_per_block,
        leaves=leaves,
        num_layers=bucket.num_layers,
        lookahead_tokens=one.lookahead_tokens,
    )


def _leaf_part(cache: LayerCache, array: str) -> str:
    return array if array in ("k", "v") else f"{cache.role}.{array}" if cache.role != array else array


def layout(groups: list[GroupSpec]) -> CacheLayout:
    """Returns the layout of a model's groups.

    Raises:
        ValueError: the model keeps nothing.
    """
    if not any(not isinstance(one.kind, Scratch) for one in groups):
        raise ValueError("the config must have at least one layer that keeps a cache, and has none")
    return CacheLayout(groups)

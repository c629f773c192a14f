"""sglang-jax's device pools as groups of leaves, and where their arrays are found at each call.

A forward pass of sglang-jax donates its arrays and puts the new ones into the lists of its pools, so an array is
never kept here, only the place where the current one is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax._checks import shown
from kvjax.groups import FullAttention, GroupSpec, Kind, LeafSpec, Recurrent, SlidingWindow

# Lists of arrays that a pool may have, all with the page (or the slot of a state) as their first dimension.
_PAGED_LISTS = ("kv_buffer", "indexer_key_buffer")
_STATE_LISTS = ("recurrent_buffers", "conv_buffers")


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """An array's place: `holder.<attribute>[path[0]][path[1]]…`."""

    holder: Any
    attribute: str
    path: tuple[int, ...]

    @property
    def array(self) -> Any:
        return self._list()[self.path[-1]]

    def put(self, array: Any) -> None:
        self._list()[self.path[-1]] = array

    def _list(self) -> Any:
        found = getattr(self.holder, self.attribute)
        for step in self.path[:-1]:
            found = found[step]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class DeviceGroup:
    """One device pool of sglang-jax, seen as a group.

    Args:
        spec: the group; its blocks are the pool's pages, or its slots of states.
        places: where the array of each leaf is, by leaf name.
    """

    spec: GroupSpec
    places: Mapping[str, _Place]

    def arrays(self) -> dict[str, Any]:
        """The arrays as they are now, by leaf name."""
        return {name: place.array for name, place in self.places.items()}

    def put(self, arrays: Mapping[str, Any]) -> None:
        """Puts the group's arrays among `arrays` where the device pool keeps its own."""
        for name, place in self.places.items():
            place.put(arrays[name])

    @property
    def num_blocks(self) -> int:
        """Blocks that every array holds, those that an allocator never hands out included."""
        return min(place.array.shape[0] for place in self.places.values())


def groups_of(
    device_pool: Any, *, window_tokens: int | None = None, state_pool: Any = None, tokens_per_state: int | None = None
) -> list[DeviceGroup]:
    """Returns the groups that one of sglang-jax's device pools holds.

    Args:
        device_pool: `MHATokenToKVPool` or `MLATokenToKVPool` (one group, `full`, indexer keys included), `SWAKVPool`
            (`full` and `swa`), or `HybridLinearKVPool` (`full`).
        window_tokens: tokens that the sliding window of a `SWAKVPool` covers.
        state_pool: the `RecurrentStatePool` beside it, the group `recurrent`.
        tokens_per_state: the distance of two snapshots of a recurrent state; by default a page.

    Raises:
        ValueError: a pool that has other parts, or `window_tokens` missing or without a window to describe.
    """
    full = getattr(device_pool, "full_kv_pool", device_pool)
    sliding = getattr(device_pool, "swa_kv_pool", None)
    if (sliding is None) != (window_tokens is None):
        has = "has no `swa_kv_pool`" if sliding is None else "has a `swa_kv_pool`"
        raise ValueError(
            f"`window_tokens` must be given for a device pool with a sliding window, and only for one; this "
            f"{type(device_pool).__name__} {has}, got {shown(window_tokens)}"
        )
    tokens_per_page = device_pool.page_size
    groups = [device_group("full", FullAttention(), tokens_per_page, full, _PAGED_LISTS)]
    if sliding is not None and window_tokens is not None:
        kind = SlidingWindow(window_tokens=window_tokens)
        groups.append(device_group("swa", kind, tokens_per_page, sliding, _PAGED_LISTS))
    if state_pool is not None:
        spacing = tokens_per_page if tokens_per_state is None else tokens_per_state
        groups.append(device_group("recurrent", Recurrent(), spacing, state_pool, _STATE_LISTS))
    return groups


def device_group(
    name: str, kind: Kind, tokens_per_block: int, holder: Any, lists: Sequence[str] = _PAGED_LISTS
) -> DeviceGroup:
    """Returns one pool of arrays as a group.

    Args:
        name: of the group.
        kind: its kind of attention.
        tokens_per_block: tokens of a page, or from one state to the next.
        holder: the object that has the lists.
        lists: attributes that hold lists (or lists of lists) of arrays; the first must be there.

    Raises:
        ValueError: the first list is not there, or empty.
    """
    places = {}
    for attribute in lists:
        for path in _paths(getattr(holder, attribute, None) or []):
            label = ".".join(map(str, path))
            places[f"{name}.{attribute}.{label}"] = _Place(holder, attribute, path)
    if not getattr(holder, lists[0], None):
        raise ValueError(
            f"`device_pool` must keep a list of arrays in `{lists[0]}` for the group {name!r}, "
            f"got a {type(holder).__name__} without one"
        )
    leaves = [LeafSpec(leaf, place.array.shape[1:], place.array.dtype) for leaf, place in places.items()]
    return DeviceGroup(GroupSpec(name, kind, tokens_per_block, leaves=leaves, num_layers=_num_layers(holder)), places)


def _paths(found: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Places of the arrays in a list, or in lists in it."""
    for place, each in enumerate(found):
        if isinstance(each, (list, tuple)):
            yield from _paths(each, (*path, place))
        else:
            yield (*path, place)


def _num_layers(holder: Any) -> int:
    return getattr(holder, "layer_num", None) or getattr(holder, "num_linear_recurrent_layers", 1)

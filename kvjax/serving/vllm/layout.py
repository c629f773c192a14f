"""From vLLM's groups of caches to a `CacheLayout`.

vLLM's classes are told by their names: this module works without vLLM. A group is named by its kind and its place in
`kv_cache_groups`: `full0`, `sliding1`, `chunked2`, `state3`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax._checks import shown
from kvjax.groups import CacheLayout, ChunkedLocal, FullAttention, GroupSpec, Kind, LeafSpec, Recurrent, SlidingWindow

_WORDS = {FullAttention: "full", SlidingWindow: "sliding", ChunkedLocal: "chunked", Recurrent: "state"}


@dataclass(frozen=True, slots=True)
class VllmGroup:
    """A group as vLLM describes it.

    Args:
        name: its kind and place.
        kind: which tokens it reads.
        tokens_per_block: as vLLM allocates; of recurrent groups with slots, the greatest common divisor of the other
            groups'.
        layer_names: the layers that share its block table.
        has_slots: of a recurrent group, whether each request has one state, in a slot of the runner; else its states
            are in blocks of vLLM, each in the block that ends where it is the state.
    """

    name: str
    kind: Kind
    tokens_per_block: int
    layer_names: tuple[str, ...]
    has_slots: bool = False


def groups_of(kv_cache_config: Any) -> tuple[VllmGroup, ...]:
    """Returns the groups of a `KVCacheConfig`, in its order.

    Raises:
        ValueError: there is no group, or one that cannot be restored by blocks; the text names its layers' spec.
    """
    listed = kv_cache_config.kv_cache_groups
    kinds = [_kind(group) for group in listed]
    has_slots = [_has_slots(group.kv_cache_spec, kind) for group, kind in zip(listed, kinds, strict=True)]
    blocks = [
        group.kv_cache_spec.block_size
        for group, kind in zip(listed, kinds, strict=True)
        if not isinstance(kind, Recurrent)
    ]
    if not blocks:
        raise ValueError("`kv_cache_config` must have a group of attention layers, got none")
    return tuple(
        VllmGroup(
            f"{_WORDS[type(kind)]}{g}",
            kind,
            math.gcd(*blocks) if slots else group.kv_cache_spec.block_size,
            tuple(group.layer_names),
            slots,
        )
        for g, (group, kind, slots) in enumerate(zip(listed, kinds, has_slots, strict=True))
    )


def tokens_per_hash(groups: Sequence[VllmGroup], hash_block_size: int | None) -> int | None:
    """Returns the tokens that vLLM's own prefix hashes cover, or `None` if they are too coarse to name blocks by.

    vLLM hashes in units of `hash_block_size`; models with recurrent layers get units of about the longest context.
    """
    fits = hash_block_size and all(group.tokens_per_block % hash_block_size == 0 for group in groups)
    return hash_block_size if fits else None


def layout_of(
    groups: Sequence[VllmGroup], leaves: Mapping[str, Sequence[LeafSpec]], hash_unit: int | None
) -> CacheLayout:
    """Returns the layout of some groups.

    Args:
        groups: in the order of vLLM's block tables.
        leaves: the arrays of each group, by its name; groups that share an array list it both.
        hash_unit: as `tokens_per_hash` returns it.
    """
    return CacheLayout(
        [GroupSpec(group.name, group.kind, group.tokens_per_block, leaves[group.name]) for group in groups],
        tokens_per_hash=hash_unit,
    )


def _kind(group: Any) -> Kind:
    if getattr(group, "is_eagle_group", False) or getattr(group, "host_resident", False):
        what = "a draft model's" if getattr(group, "is_eagle_group", False) else "in host memory"
        raise ValueError(f"groups of vLLM must be the model's own and on the device, got {what}: {group.layer_names}")
    spec = group.kv_cache_spec
    if type(spec).__name__ != "UniformTypeKVCacheSpecs":
        return _kind_of_spec(spec)
    kinds = {_kind_of_spec(one) for one in spec.kv_cache_specs.values()}
    if len(kinds) != 1:
        raise ValueError(f"layers that share a block table must be of one kind, got {sorted(map(repr, kinds))}")
    return kinds.pop()


def _has_slots(spec: Any, kind: Kind) -> bool:
    """Whether a group's states are in slots. With prefix caching (mode 'align') vLLM ends steps where blocks end."""
    if not isinstance(kind, Recurrent):
        return False
    specs = list(getattr(spec, "kv_cache_specs", {"": spec}).values())
    modes = {getattr(one, "mamba_cache_mode", "none") for one in specs}
    if modes not in ({"none"}, {"align"}):
        raise ValueError(
            f"`mamba_cache_mode` must be 'none' or 'align' with kvjax, got {shown(' and '.join(sorted(modes)))}"
        )
    return modes == {"none"}


def _kind_of_spec(spec: Any) -> Kind:
    """The kind of one layer. A sliding layer that vLLM keeps in full, as `FullAttentionSpec`, is full here, too."""
    if getattr(spec, "non_causal", False):
        raise ValueError("layers must read nothing that comes after a token, got `non_causal` attention")
    match type(spec).__name__:
        case "FullAttentionSpec" | "MLAAttentionSpec":
            return FullAttention()
        case "SlidingWindowSpec":
            return SlidingWindow(spec.sliding_window)
        case "ChunkedLocalAttentionSpec":
            return ChunkedLocal(spec.attention_chunk_size)
        case "MambaSpec":
            return Recurrent()
    raise ValueError(
        "caches must be of FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec or "
        f"MambaSpec, got {type(spec).__name__}"
    )

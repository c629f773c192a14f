"""What a cache looks like: kinds of attention, leaves, groups and the layout they form.

A *group* is a set of layers that share a block table, a kind of attention and a number of tokens per
block. Nothing here knows what resuming needs (see `kvjax.coverage`) or how blocks form chunks (see
`kvjax.chunking`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

from kvjax._checks import integer, shown, text


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every earlier token is read: full attention, MLA, compressed caches, indexer keys."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The last `window_tokens` tokens are read, the one being computed included.

    Args:
        window_tokens: tokens of the window.

    Raises:
        ValueError: `window_tokens` is not a positive int.
    """

    window_tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "window_tokens", integer(self.window_tokens, "window_tokens", at_least=1))


@dataclass(frozen=True, slots=True)
class ChunkedLocal:
    """Tokens are read back to the last multiple of `chunk_tokens` (the attention chunk of Llama-4).

    Args:
        chunk_tokens: tokens of an attention chunk.

    Raises:
        ValueError: `chunk_tokens` is not a positive int.
    """

    chunk_tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk_tokens", integer(self.chunk_tokens, "chunk_tokens", at_least=1))


@dataclass(frozen=True, slots=True)
class Recurrent:
    """One state stands for all earlier tokens: Mamba, gated delta net, KDA, short convolution."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Nothing is worth keeping. Such a group is never keyed, stored, loaded or counted, but keeps its
    place in every per-group list."""


Kind = FullAttention | SlidingWindow | ChunkedLocal | Recurrent | Scratch


def cache_dtype(dtype: Any) -> np.dtype:
    """Returns the NumPy dtype of a cache's elements, the 8- and 16-bit floats of `ml_dtypes` included.

    Raises:
        ValueError: the dtype is unknown, or its elements are not numbers of 8, 16 or 32 bits.

    >>> cache_dtype("bfloat16").itemsize
    2
    """
    found = getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype
    try:
        resolved = np.dtype(found) if found is not None else None
    except TypeError:
        resolved = None
    known = resolved is not None and resolved.kind in "biufcV" and not resolved.names and not resolved.subdtype
    if resolved is None or not known or (resolved.kind == "V" and not hasattr(ml_dtypes, resolved.name)):
        raise ValueError(f"`dtype` must name the element type of a cache, such as 'bfloat16', got {shown(dtype)}")
    narrow = resolved.name.endswith(("int4", "int2", "int1")) or resolved.name.startswith(("float4_", "float6_"))
    if resolved.kind not in "iufV" or resolved.itemsize not in (1, 2, 4) or narrow:
        raise ValueError(
            f"`dtype` must have elements that are numbers of 8, 16 or 32 bits, got {resolved.name}; "
            f"view the cache as one of uint8, uint16 or uint32"
        )
    return resolved.newbyteorder("=") if resolved.kind in "iuf" else resolved


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One array that holds blocks.

    Args:
        name: names the array. Groups that list the same name share the array.
        block_shape: global shape of one block. The array is `(num_blocks, *block_shape)`.
        dtype: element type, anything `numpy.dtype` or `ml_dtypes` knows, by name or as a type; kept as a
            `numpy.dtype`.
        layers: `None`, or the number of layers stacked in front: the array is then
            `(layers, num_blocks, *block_shape)` and a block of the group takes one row of each layer.

    Raises:
        ValueError: an empty name, a shape or layer count that is not of positive ints, an unknown dtype.
    """

    name: str
    block_shape: Sequence[int]
    dtype: Any
    layers: int | None = None

    def __post_init__(self) -> None:
        text(self.name, "name")
        shape = self.block_shape
        if isinstance(shape, (str, bytes)) or not isinstance(shape, Iterable):
            raise ValueError(
                f"`block_shape` of leaf {self.name!r} must be a tuple of positive ints, got {shown(shape)}"
            )
        label = f"block_shape of leaf {self.name!r}"
        object.__setattr__(self, "block_shape", tuple(integer(n, label, at_least=1) for n in shape))
        object.__setattr__(self, "dtype", cache_dtype(self.dtype))
        if self.layers is not None:
            object.__setattr__(self, "layers", integer(self.layers, f"layers of leaf {self.name!r}", at_least=1))

    @property
    def row_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return math.prod(self.block_shape) * self.dtype.itemsize

    @property
    def rows_per_block(self) -> int:
        """Rows that one block of the group takes in the array: 1, or `layers` of a stacked leaf."""
        return 1 if self.layers is None else self.layers

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of this leaf."""
        return self.row_bytes * self.rows_per_block


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share a block table, a kind of attention and a number of tokens per block.

    Args:
        name: names the group in every mapping.
        kind: one of the five kinds.
        tokens_per_block: tokens that one block covers.
        leaves: every array of the group, all layers. Either this or `block_bytes` is given.
        block_bytes: bytes of one block over all layers; the sum over `leaves` where those are given.
        num_layers: for display only; it never multiplies.
        lookahead_tokens: tokens past the resume position that must be resident (a draft head);
            full and sliding attention only.

    Raises:
        ValueError: a value of the wrong type or range, neither or contradicting `leaves` and
            `block_bytes`, a leaf listed twice, or a lookahead on a kind that has none.
    """

    name: str
    kind: Kind
    tokens_per_block: int
    leaves: Sequence[LeafSpec] = ()
    block_bytes: int = field(default=None)  # pyright: ignore[reportAssignmentType]  # filled from `leaves`
    num_layers: int = 1
    lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        text(self.name, "name")
        of = f" of group {self.name!r}"
        if not isinstance(self.kind, Kind):
            raise ValueError(
                f"`kind`{of} must be FullAttention(), SlidingWindow(…), ChunkedLocal(…), Recurrent() or Scratch(), "
                f"got {shown(self.kind)}"
            )
        tokens = integer(self.tokens_per_block, f"tokens_per_block{of}", at_least=1)
        leaves = self._checked_leaves(of)
        block_bytes = self._checked_bytes(of, leaves)
        lookahead = integer(self.lookahead_tokens, f"lookahead_tokens{of}", at_least=0)
        if lookahead and not isinstance(self.kind, (FullAttention, SlidingWindow)):
            raise ValueError(
                f"`lookahead_tokens`{of} must be 0 for {type(self.kind).__name__}: only full and sliding attention "
                f"have a lookahead, got {lookahead}"
            )
        object.__setattr__(self, "tokens_per_block", tokens)
        object.__setattr__(self, "leaves", leaves)
        object.__setattr__(self, "block_bytes", block_bytes)
        object.__setattr__(self, "num_layers", integer(self.num_layers, f"num_layers{of}", at_least=0))
        object.__setattr__(self, "lookahead_tokens", lookahead)

    def _checked_leaves(self, of: str) -> tuple[LeafSpec, ...]:
        given = self.leaves
        if isinstance(given, LeafSpec) or not isinstance(given, Iterable):
            raise ValueError(f"`leaves`{of} must be a sequence of LeafSpec, got {shown(given)}")
        leaves = tuple(given)
        for leaf in leaves:
            if not isinstance(leaf, LeafSpec):
                raise ValueError(f"`leaves`{of} must be a sequence of LeafSpec, got {shown(leaf)} in it")
        twice = _first_twice(leaf.name for leaf in leaves)
        if twice is not None:
            raise ValueError(f"`leaves`{of} must have distinct names, got {shown(twice)} twice")
        return leaves

    def _checked_bytes(self, of: str, leaves: tuple[LeafSpec, ...]) -> int:
        total = sum(leaf.block_bytes for leaf in leaves)
        if self.block_bytes is None:
            if not leaves:
                raise ValueError(f"one of `leaves` and `block_bytes`{of} must be given, got neither")
            return total
        given = integer(self.block_bytes, f"block_bytes{of}", at_least=1)
        if leaves and given != total:
            raise ValueError(f"`block_bytes`{of} must be the sum over its leaves, {total}, got {given}")
        return given

    @property
    def is_cached(self) -> bool:
        """False for scratch groups, which are never keyed, stored, loaded or counted."""
        return not isinstance(self.kind, Scratch)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's cache, in the order of every per-group list.

    Args:
        groups: the groups; at least one is not scratch.
        tokens_per_hash: tokens covered by one prefix hash, or `None` for the greatest common divisor of
            the cached groups' `tokens_per_block`.

    Raises:
        ValueError: no group, a name used twice, no group that is cached, a leaf shared under two shapes
            or dtypes, or a `tokens_per_hash` that is not a positive int.
    """

    groups: Sequence[GroupSpec]
    tokens_per_hash: int | None = None

    def __post_init__(self) -> None:
        given = self.groups
        if isinstance(given, GroupSpec) or not isinstance(given, Iterable):
            raise ValueError(f"`groups` must be a sequence of GroupSpec, got {shown(given)}")
        groups = tuple(given)
        for group in groups:
            if not isinstance(group, GroupSpec):
                raise ValueError(f"`groups` must be a sequence of GroupSpec, got {shown(group)} in it")
        if not groups:
            raise ValueError("`groups` must hold at least one group, got none")
        names = [group.name for group in groups]
        twice = _first_twice(names)
        if twice is not None:
            raise ValueError(f"`groups` must have distinct names, got {shown(twice)} twice")
        if not any(group.is_cached for group in groups):
            raise ValueError(f"`groups` must hold at least one group that is not scratch, got only {names}")
        _check_shared_leaves(groups)
        object.__setattr__(self, "groups", groups)
        if self.tokens_per_hash is not None:
            object.__setattr__(self, "tokens_per_hash", integer(self.tokens_per_hash, "tokens_per_hash", at_least=1))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all groups, in order."""
        return tuple(group.name for group in self.groups)

    @property
    def cached(self) -> tuple[int, ...]:
        """`group_idx` of every group that is not scratch, in order."""
        return tuple(g for g, group in enumerate(self.groups) if group.is_cached)

    @property
    def leaves(self) -> dict[str, LeafSpec]:
        """Every array of the cache once, by name, in layout order, scratch groups left out."""
        return {leaf.name: leaf for g in self.cached for leaf in self.groups[g].leaves}

    def index(self, name: Any, argument: str) -> int:
        """Returns the `group_idx` of the cached group called `name`.

        Raises:
            ValueError: there is no such group, or it is scratch. The text names `argument`.
        """
        if name not in self.names:
            raise ValueError(f"`{argument}` must name groups of the layout {list(self.names)}, got {shown(name)}")
        group_idx = self.names.index(name)
        if not self.groups[group_idx].is_cached:
            raise ValueError(f"`{argument}` must name groups that are cached, got the scratch group {name!r}")
        return group_idx


def _first_twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _check_shared_leaves(groups: tuple[GroupSpec, ...]) -> None:
    first: dict[str, tuple[str, LeafSpec]] = {}
    for group in groups:
        for leaf in group.leaves:
            owner, known = first.setdefault(leaf.name, (group.name, leaf))
            if known != leaf:
                raise ValueError(
                    f"leaf {leaf.name!r} is shared by groups {owner!r} and {group.name!r} and must have one shape "
                    f"and dtype, got {_shape_text(known)} and {_shape_text(leaf)}"
                )


def _shape_text(leaf: LeafSpec) -> str:
    stacked = "" if leaf.layers is None else f" x {leaf.layers} layers"
    return f"{leaf.dtype.name}{list(leaf.block_shape)}{stacked}"


def hash_unit(groups: Iterable[GroupSpec]) -> int:
    """Returns the greatest common divisor of `tokens_per_block` over the groups that are cached."""
    return reduce(math.gcd, (group.tokens_per_block for group in groups if group.is_cached))

"""The pieces in which the devices of a mesh hold a leaf.

A leaf of global shape `(layers, num_blocks, *block_shape)` (layers = 1 unless it is stacked) may be split over
layers, over blocks and within the blocks. Devices that hold the same piece are its *holders*.
"""

import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import Sharding

from kvjax.groups import LeafSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """One distinct piece of a leaf.

    Args:
        holders: places, in the order of the devices, of those that hold it.
        layers: first layer, and the one past the last.
        blocks: first block, and the one past the last.
        box: for each dimension of a block, where the piece starts and ends.
    """

    holders: tuple[int, ...]
    layers: tuple[int, int]
    blocks: tuple[int, int]
    box: tuple[tuple[int, int], ...]

    @property
    def num_layers(self) -> int:
        """Layers in the piece."""
        return self.layers[1] - self.layers[0]

    @property
    def num_blocks(self) -> int:
        """Blocks of each layer in the piece."""
        return self.blocks[1] - self.blocks[0]

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of the piece's part of a block."""
        return tuple(high - low for low, high in self.box)

    def row_bytes(self, spec: LeafSpec) -> int:
        """Bytes of the piece's part of one block of one layer."""
        return math.prod(self.block_shape) * spec.dtype.itemsize

    def has_whole_blocks(self, spec: LeafSpec) -> bool:
        """Whether no other piece has a part of its blocks."""
        return self.block_shape == spec.block_shape


def shards_of(
    spec: LeafSpec, shape: tuple[int, ...], sharding: Sharding, devices: tuple[Any, ...]
) -> tuple[Shard, ...]:
    """Returns the distinct pieces of a leaf, in the order of their first holders.

    Args:
        spec: the leaf.
        shape: of the array, `(num_blocks, *block_shape)`, or `(layers, num_blocks, *block_shape)` if stacked.
        sharding: of the array.
        devices: all of its devices, in order.
    """
    held = sharding.devices_indices_map(shape)
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for place, device in enumerate(devices):
        index = held[device] or ()
        spans = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        holders.setdefault(spans, []).append(place)
    lead = () if spec.layers is not None else ((0, 1),)
    pieces = []
    for spans, places in holders.items():
        layers, blocks, *box = *lead, *spans
        pieces.append(Shard(tuple(places), layers, blocks, tuple(box)))
    return tuple(pieces)

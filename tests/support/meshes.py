"""Layouts whose caches are split over a mesh of eight CPU devices in several ways."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import CacheLayout, FullAttention, GroupSpec, LeafSpec, Recurrent, SlidingWindow

P = PartitionSpec

# Heads are a multiple of 4, blocks of 2. Names say how a leaf is meant to be split.
LAYOUT = CacheLayout(
    [
        GroupSpec(
            "full",
            FullAttention(),
            4,
            (LeafSpec("heads.k", (4, 8, 3), "bfloat16"), LeafSpec("heads.v", (4, 8, 3), "float8_e5m2")),
        ),
        GroupSpec(
            "mla", FullAttention(), 8, (LeafSpec("latent", (8, 9), "bfloat16"), LeafSpec("index", (8, 3), np.uint8))
        ),
        GroupSpec("local", SlidingWindow(7), 4, (LeafSpec("heads.stack", (4, 8), np.int8, layers=2),)),
        GroupSpec(
            "state", Recurrent(), 4, (LeafSpec("heads.ssm", (8, 5), np.float32), LeafSpec("conv", (7,), np.float16))
        ),
    ]
)

# All of it is split over heads: nothing is held twice.
SPLIT = CacheLayout([group for group in LAYOUT.groups if group.name in ("full", "local")])


def mesh_of(*shape: int) -> Mesh:
    count = int(np.prod(shape))
    devices = jax.devices()
    assert len(devices) >= count, f"tests need {count} devices; tests/conftest.py asks XLA for eight"
    return Mesh(np.array(devices[:count]).reshape(shape), ("data", "model")[-len(shape) :])


def over_heads(leaf: LeafSpec, mesh: Mesh) -> NamedSharding:
    """Heads over `model`; everything else is replicated."""
    stacked = () if leaf.layers is None else (None,)
    if not leaf.name.startswith("heads"):
        return NamedSharding(mesh, P())
    heads = (None,) * (1 if len(leaf.block_shape) > 1 and leaf.name != "heads.ssm" else 0)
    return NamedSharding(mesh, P(*stacked, None, *heads, "model"))


def over_blocks(leaf: LeafSpec, mesh: Mesh) -> NamedSharding:
    """Blocks over `data`, heads over `model`."""
    spec = list(over_heads(leaf, mesh).spec)
    place = 0 if leaf.layers is None else 1
    spec += [None] * (place + 1 - len(spec))
    spec[place] = "data"
    return NamedSharding(mesh, P(*spec))


def on_one(leaf: LeafSpec, mesh: Mesh) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])


Split = tuple[tuple[int, ...], Callable[[LeafSpec, Mesh], jax.sharding.Sharding]]

SPLITS: dict[str, Split] = {
    "one device": ((1,), on_one),
    "heads over 4": ((4,), over_heads),
    "heads over 8": ((8,), over_heads),
    "heads over 4, all twice": ((2, 4), over_heads),
    "blocks over 2, heads over 4": ((2, 4), over_blocks),
    "blocks over 8": ((8, 1), over_blocks),
}

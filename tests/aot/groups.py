"""The groups of caches that kernels are compiled for, as serving stacks lay them out."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.aot.tpu import AXIS, abstract


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf as a serving stack lays it out.

    Args:
        block_shape: of one block.
        dtype: of the elements.
        heads: dimension of the block that is split over a mesh; `None` if the leaf is replicated.
        layers: layers of a stacked leaf; `None` if it is not.
    """

    block_shape: tuple[int, ...]
    dtype: str
    heads: int | None = None
    layers: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers."""
        return math.prod(self.block_shape) * jnp.dtype(self.dtype).itemsize * (self.layers or 1)

    def spec(self) -> P:
        """How the whole leaf is split over a mesh."""
        leading = [None] if self.layers is None else [None, None]
        return P(*leading, *(AXIS if dim == self.heads else None for dim in range(len(self.block_shape))))

    def of(self, mesh: Mesh, num_blocks: int) -> jax.ShapeDtypeStruct:
        """The whole leaf, to compile for."""
        leading = (num_blocks,) if self.layers is None else (self.layers, num_blocks)
        return abstract(mesh, (*leading, *self.block_shape), jnp.dtype(self.dtype), *self.spec())


RECURRENT, SHORT_CONVOLUTION = "recurrent, f32 and bf16", "short convolution, bf16"
# RPA v3 is `(tokens, 2 * heads / p, p, head_dim)` with p = 32 / bits, for 8 heads; with heads of 64, K and V share
# 128 lanes. MLA is `(tokens / p, p, 640)`, the same on each device.
GROUPS: dict[str, tuple[Leaf, ...]] = {
    "RPA v3, bf16": (Leaf((64, 8, 2, 128), "bfloat16", heads=1),) * 2,
    "RPA v3, f32": (Leaf((64, 16, 1, 128), "float32", heads=1),) * 2,
    "RPA v3, fp8": (Leaf((64, 4, 4, 128), "float8_e4m3fn", heads=1),) * 2,
    "RPA v3, heads of 64": (Leaf((64, 4, 2, 128), "bfloat16", heads=1),) * 2,
    "RPA v3, heads of 256, fp8 e5m2": (Leaf((16, 4, 4, 256), "float8_e5m2", heads=1),) * 2,
    "RPA v3, stacked layers": (Leaf((16, 8, 2, 128), "bfloat16", heads=1, layers=4),),
    "MLA, bf16": (Leaf((32, 2, 640), "bfloat16"),) * 2,
    "MLA, fp8": (Leaf((16, 4, 640), "float8_e4m3fn"),) * 2,
    RECURRENT: (Leaf((32, 128, 128), "float32", heads=0), Leaf((3, 4096), "bfloat16", heads=1)),
    SHORT_CONVOLUTION: (Leaf((3, 4096), "bfloat16", heads=1),),
    "int8 and its f32 scales": (Leaf((64, 8, 4, 128), "int8", heads=1), Leaf((8, 8, 128), "float32", heads=0)),
}


def bytes_on_one(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array's shard."""
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * jnp.dtype(array.dtype).itemsize

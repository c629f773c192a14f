"""Fused transfers on a mesh of eight CPU devices, caches split over heads. Run in a process of its own.

`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.support.fused_on_many_devices` exits with 0 if
every byte is right, the caches stay in place and the rows come out split as the caches are.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax import fused
from tests.pallas_kernels.data import assert_same_bits, ids_of, random_array

NUM_BLOCKS, BUCKET, LAYERS, BLOCK = 12, 5, 3, (4, 8, 6)


def main() -> None:
    """Restores and collects in one step, for a float that XLA:CPU would normalize and for an integer."""
    assert len(jax.devices()) == 8
    mesh = Mesh(np.array(jax.devices()), ("model",))
    rng = np.random.default_rng(8)
    for dtype in ("bfloat16", "float8_e5m2", "uint8", "float32"):
        sharding = NamedSharding(mesh, P(None, None, "model", None))
        before = random_array(rng, (NUM_BLOCKS, *BLOCK), dtype)
        rows = random_array(rng, (LAYERS, 4, *BLOCK), dtype)
        targets, finished = ids_of(rng, NUM_BLOCKS, (4,), 4), ids_of(rng, NUM_BLOCKS, (BUCKET,), 3)
        cache = jax.device_put(before, sharding)
        arriving = fused.make_arriving(
            rows, targets, bucket=BUCKET, num_blocks=NUM_BLOCKS, sharding=fused.rows_sharding(cache)
        )

        def step(cache: jax.Array, arriving: fused.Arriving, finished: np.ndarray) -> tuple[jax.Array, jax.Array]:
            _, cache = fused.restore(0.0, cache, fused.fetch(arriving, 1))
            return cache, fused.collect(cache, finished)

        compiled = jax.jit(step, donate_argnums=0).lower(cache, arriving, finished).compile()
        assert "all-gather" not in (compiled.as_text() or "")
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == cache.nbytes // 8
        cache, left = compiled(cache, arriving, finished)
        after = before.copy()
        after[targets] = rows[1]
        assert_same_bits(cache, after)
        assert_same_bits(np.asarray(left)[:3], after[finished[:3]])
        wanted = fused.rows_sharding(cache, arriving=False)
        assert left.sharding.is_equivalent_to(wanted, left.ndim), left.sharding


if __name__ == "__main__":
    main()

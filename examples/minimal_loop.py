"""kvjax in a serving loop: store a request's blocks, lose them on the device, and get them back.

The layout is a toy, one full-attention group and one sliding-window group of other geometry, and the cache
holds random numbers instead of keys and values.

    python examples/minimal_loop.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import kvjax


def main() -> None:
    """Runs the loop once and checks every restored byte."""
    full_kv = kvjax.LeafSpec("full.kv", (16, 2, 64), jnp.dtype(jnp.bfloat16))
    local_kv = kvjax.LeafSpec("local.kv", (8, 4, 32), jnp.dtype(jnp.float32))
    layout = kvjax.CacheLayout(
        (
            kvjax.GroupSpec("full", kvjax.FullAttention(), tokens_per_block=16, leaves=(full_kv,)),
            kvjax.GroupSpec("local", kvjax.SlidingWindow(32), tokens_per_block=8, leaves=(local_kv,)),
        )
    )
    keys = jax.random.split(jax.random.key(0))
    caches = {
        "full.kv": jax.random.normal(keys[0], (8, 16, 2, 64), jnp.bfloat16),
        "local.kv": jax.random.normal(keys[1], (16, 8, 4, 32)),
    }
    before = {name: np.asarray(cache) for name, cache in caches.items()}
    tokens = np.arange(100)

    offloader = kvjax.Offloader(layout, caches, host_bytes=1 << 20)
    offloader.lookup("first", tokens)  # nothing is known yet; then the engine computes the prompt into these blocks:
    tables = {"full": np.arange(7), "local": np.arange(13)}
    caches, _ = offloader.store(caches, "first", tables, num_tokens=100)
    offloader.finish("first")  # its blocks may be used again at once
    caches = {name: jnp.zeros_like(cache) for name, cache in caches.items()}

    found = offloader.lookup("again", tokens)  # the same prompt, later
    caches, _ = offloader.load(caches, "again", tables)  # compute the rest of the prompt with these caches
    offloader.finish("again")

    print(f"{found.hit_tokens} of {len(tokens)} tokens need no computing")
    for group in layout.groups:
        for chunk in found.load[group.name]:  # a chunk is one block here
            name = group.leaves[0].name
            assert np.array_equal(np.asarray(caches[name][chunk]), before[name][chunk]), "a byte changed"
        print(f"{group.name}: blocks {found.load[group.name].tolist()} are as they were")
    offloader.close()


if __name__ == "__main__":
    main()

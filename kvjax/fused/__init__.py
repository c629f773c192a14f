"""Transfers inside a user's jitted step: restored blocks arrive and finished blocks leave layer by layer.

`fetch` brings one layer's restored rows from host memory to the device, `restore` writes them into the layer's
cache before the layer reads it, `collect` sends finished blocks to host memory after the layer wrote them, and
`settle` says by when they must have left. All order is data dependence: `restore` returns the cache that the layer
reads, and `collect` reads the version that the layer's write returned, so that its blocks may be overwritten at once.

A step over layers that share a block table (one step and one program for every mix of blocks in a bucket):

>>> import jax, jax.numpy as jnp, numpy as np
>>> from kvjax import fused
>>> def step(x, caches, arriving, finished):
...     leaving = []
...     for i, cache in enumerate(caches):
...         x, cache = fused.restore(x, cache, fused.fetch(arriving, i))
...         cache = cache.at[1].set(x)  # the layer writes, then reads: here both are toys
...         leaving.append(fused.collect(cache, finished))
...         x = x + cache.sum(0)
...         if i >= 2:
...             x, leaving[i - 2] = fused.settle(x, leaving[i - 2])
...         caches[i] = cache
...     return x, caches, leaving
>>> caches = [jnp.zeros((4, 2), jnp.float32, device=jax.devices()[0]) for _ in range(3)]
>>> arriving = fused.make_arriving(
...     np.ones((3, 1, 2), np.float32), [3], bucket=2, num_blocks=4, sharding=fused.rows_sharding(caches[0])
... )
>>> finished = fused.pad_ids([1, 3], bucket=2, num_blocks=4)
>>> x, caches, leaving = jax.jit(step, donate_argnames="caches")(jnp.zeros(2), caches, arriving, finished)
>>> caches[0].tolist(), leaving[0].tolist(), leaving[0].sharding.memory_kind
([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]], 'pinned_host')

How compilers schedule it, read off programs compiled for TPU and CUDA: a fetch starts layers ahead of its restore and
is waited for just before it; a collect starts after its layer's write and runs beside the layers that follow, up to
its `settle` (without which they all run at the step's end). XLA:GPU waits for fetches too early unless each is tied to
the layer ahead: there, fetch layer `i + 1` in layer `i`, at a place tied to what that layer takes, by
`x, place = jax.lax.optimization_barrier((x, jnp.int32(i + 1)))`.

Under `lax.scan` over layers, with stacked caches `(layers, num_blocks, *block_shape)` in the carry: pass `layer` to
`restore` and `collect`; close over the arriving rows, fetch the next layer's in the body and carry them; the scanned
outputs of `collect(…, as_words=True)` are stacked in host memory.

Sizes are static: a bucket is a number of rows, and every bucket compiles a program once. A bucket of no rows adds
nothing to the program.
"""

from kvjax.fused.host import bucket_of as bucket_of
from kvjax.fused.host import make_arriving as make_arriving
from kvjax.fused.host import pad_ids as pad_ids
from kvjax.fused.host import rows_sharding as rows_sharding
from kvjax.fused.steps import FusedSteps as FusedSteps
from kvjax.fused.steps import Step as Step
from kvjax.fused.transfers import Arriving as Arriving
from kvjax.fused.transfers import Fetched as Fetched
from kvjax.fused.transfers import collect as collect
from kvjax.fused.transfers import fetch as fetch
from kvjax.fused.transfers import restore as restore
from kvjax.fused.transfers import settle as settle

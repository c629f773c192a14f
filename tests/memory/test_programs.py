"""What the transports' programs are traced for."""

import jax
import pytest

import kvjax
from kvjax.memory.programs import new_pool_program, pool_programs, unit_shape
from kvjax.memory.registration import register
from kvjax.packing import cut_into_units, unit_bytes
from tests.support.meshes import SPLIT, SPLITS, mesh_of
from tests.support.toy_engine import make_caches

HOST = jax.memory.Space.Host


@pytest.mark.parametrize("split", ["one device", "heads over 4"])
def test_programs_know_which_arrays_lie_on_the_host(split):
    """JAX traced an abstract array as one in device memory, whatever its sharding said: the kernel for the pool was
    then one for device memory."""
    shape, sharding_of = SPLITS[split]
    mesh, host = mesh_of(*shape), make_caches(SPLIT, 16)
    caches = register(
        SPLIT, {name: jax.device_put(host[name], sharding_of(leaf, mesh)) for name, leaf in SPLIT.leaves.items()}
    )
    chunking = kvjax.resolve_chunking(SPLIT)
    units = cut_into_units(chunking, unit_bytes(chunking, 64))
    to_pool, from_pool = pool_programs(caches, units, 8, 4)
    for program, on_host in ((to_pool, [False, True]), (from_pool, [True, False])):
        types = program.traced().jaxpr.in_avals
        assert [one.memory_space == HOST for one in types] == [*on_host, False, False, False]
        assert {out.sharding.memory_kind for out in jax.tree.leaves(program.args[:2])} == {"device", "pinned_host"}
    pool = new_pool_program(caches, units, 8).compiled()()
    assert pool.sharding.memory_kind == "pinned_host"
    assert pool.shape == (8 * len(caches.devices), *unit_shape("cpu", units.unit_bytes // len(caches.devices)))


@pytest.mark.parametrize(
    ("platform", "num_bytes", "shape"), [("tpu", 8192, (8, 256)), ("tpu", 65536, (64, 256)), ("gpu", 768, (192,))]
)
def test_a_unit_has_the_shape_that_its_platform_can_address(platform, num_bytes, shape):
    assert unit_shape(platform, num_bytes) == shape

"""What the TPU compiler makes of a decoder's step with fused transfers: 8 layers, full and sliding in turn."""

import functools

import pytest

from tests.aot.fused_programs import PLANTS, Compiled
from tests.aot.overlap import faults
from tests.aot.tpu import NO_LIBTPU, TARGETS, run_child
from tests.support.fused_step import LEAVES

pytestmark = pytest.mark.skipif(NO_LIBTPU is not None, reason=NO_LIBTPU or "")
on_every_target = pytest.mark.parametrize("target", TARGETS)
on_meshes = pytest.mark.parametrize("variant", ["one device", "four devices"])


@functools.cache
def compiled(target: str) -> dict[str, Compiled]:
    programs = run_child("tests.aot.fused_programs", target, timeout_s=900)
    return {name: Compiled.from_json(one) for name, one in programs.items()}


@on_every_target
@on_meshes
def test_transfers_run_beside_the_layers(target, variant):
    assert faults(compiled(target)[variant].schedule, leaves_per_layer=len(LEAVES)) == []


@on_every_target
@on_meshes
def test_caches_are_updated_in_place(target, variant):
    program = compiled(target)[variant]
    assert program.alias_bytes == program.cache_bytes
    assert program.schedule.large_copies == ()


@on_every_target
@on_meshes
def test_temporaries_are_bounded_by_the_rows_that_move(target, variant):
    program = compiled(target)[variant]
    assert program.temp_bytes <= 4 * program.staging_bytes


@on_every_target
def test_temporaries_do_not_grow_with_the_caches(target):
    programs = compiled(target)
    assert programs["twice the blocks"].temp_bytes <= 1.01 * programs["one device"].temp_bytes


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant):
    program = compiled("v6e:2x2")[plant]
    late = faults(program.schedule, leaves_per_layer=len(LEAVES))
    if plant in ("late fetch", "settled at once"):
        assert late
    if plant == "no donation":
        assert program.alias_bytes == 0
    if plant in ("no donation", "an old cache returned"):
        assert program.schedule.large_copies

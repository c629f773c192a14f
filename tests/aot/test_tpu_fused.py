"""What the TPU compiler makes of a decoder's step with fused transfers: 8 layers, full and sliding in turn."""

import pytest

from tests.aot.children import Child, Children
from tests.aot.fused_programs import PLANTS, Compiled
from tests.aot.overlap import faults
from tests.aot.tpu import NO_LIBTPU, TARGETS
from tests.support.fused_step import LEAVES

pytestmark = pytest.mark.skipif(NO_LIBTPU is not None, reason=NO_LIBTPU or "")
MODULE = "tests.aot.fused_programs"
on_meshes = pytest.mark.parametrize("variant", ["one device", "four devices"])


@pytest.fixture(scope="module", params=[Child(MODULE, (target,)) for target in TARGETS])
def compiled(request, children):
    return compiled_by(children, request.param)


def compiled_by(children: Children, child: Child) -> dict[str, Compiled]:
    return {name: Compiled.from_json(one) for name, one in children.result(child).items()}


@on_meshes
def test_transfers_run_beside_the_layers(compiled, variant):
    assert faults(compiled[variant].schedule, leaves_per_layer=len(LEAVES)) == []


@on_meshes
def test_caches_are_updated_in_place(compiled, variant):
    program = compiled[variant]
    assert program.alias_bytes == program.cache_bytes
    assert program.schedule.large_copies == ()


@on_meshes
def test_temporaries_are_bounded_by_the_rows_that_move(compiled, variant):
    program = compiled[variant]
    assert program.temp_bytes <= 4 * program.staging_bytes


def test_temporaries_do_not_grow_with_the_caches(compiled):
    assert compiled["twice the blocks"].temp_bytes <= 1.01 * compiled["one device"].temp_bytes


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("child", [Child(MODULE, ("v5p:2x2x1", "planted"))])  # the target that compiles it fastest
def test_a_planted_fault_is_found(children, child, plant):
    program = compiled_by(children, child)[plant]
    late = faults(program.schedule, leaves_per_layer=len(LEAVES))
    if plant in ("late fetch", "settled at once"):
        assert late
    if plant == "no donation":
        assert program.alias_bytes == 0
    if plant in ("no donation", "an old cache returned"):
        assert program.schedule.large_copies

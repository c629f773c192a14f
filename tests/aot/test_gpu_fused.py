"""What the CUDA compiler makes of a decoder's step with fused transfers: 8 layers, full and sliding in turn.

Lowering runs everywhere. Compiling to sm_90a code runs where the compiler is installed. XLA:GPU keeps only a few
transfers in flight, of both directions together, and waits for the first ones at once. In a step that only restores and
ties each fetch to the layer ahead, every transfer but the first layer's runs beside a layer; in one that only stores,
half do or more; in one that moves both ways, all are asynchronous and no more is promised.
"""

import pytest

from tests.aot.children import Child, Children
from tests.aot.fused_programs import PLANTS, SIZES, Compiled
from tests.aot.gpu import missing
from tests.aot.overlap import TO_DEVICE, TO_HOST
from tests.support.fused_step import LEAVES

MODULE = "tests.aot.fused_programs"
TRANSFERS = SIZES.num_layers * len(LEAVES)
WAYS = {"both ways": (TO_DEVICE, TO_HOST), TO_DEVICE: (TO_DEVICE,), TO_HOST: (TO_HOST,)}
needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))
every_way = pytest.mark.parametrize("way", WAYS)
compiled_step = pytest.mark.parametrize("compiled", [Child(MODULE, ("gpu",))], indirect=True)
with_plants = pytest.mark.parametrize("compiled", [Child(MODULE, ("gpu", "planted"))], indirect=True)


@pytest.fixture
def compiled(request: pytest.FixtureRequest, children: Children) -> dict[str, Compiled]:
    return {name: Compiled.from_json(one) for name, one in children.result(request.param).items()}


@pytest.mark.parametrize("child", [Child(MODULE, ("gpu", "lowered"))])
def test_the_lowered_step_crosses_once_for_each_leaf_and_re_uses_every_cache(children, child):
    assert children.result(child) == {TO_DEVICE: TRANSFERS, TO_HOST: TRANSFERS, "aliased": TRANSFERS}


@needs_compiler
@compiled_step
@every_way
def test_all_transfers_are_asynchronous(compiled, way):
    found = compiled[way].schedule
    assert found.synchronous == ()
    for direction in (TO_DEVICE, TO_HOST):
        expected = TRANSFERS if direction in WAYS[way] else 0
        assert sum(one.direction == direction for one in found.transfers) == expected


@needs_compiler
@compiled_step
def test_fetches_tied_to_the_layer_ahead_run_beside_it(compiled):
    found = compiled[TO_DEVICE].schedule
    for i, (before, own) in enumerate(found.products[1:], 1):
        for one in found.of(TO_DEVICE, i):
            assert one.products_beside >= own
            assert one.products_before + one.products_beside >= before


@needs_compiler
@compiled_step
def test_half_of_what_leaves_or_more_runs_beside_the_products_of_a_layer(compiled):
    found = compiled[TO_HOST].schedule
    own = min(own for _, own in found.products)
    assert 2 * sum(one.products_beside >= own - 1 for one in found.transfers) >= TRANSFERS


@needs_compiler
@compiled_step
@every_way
def test_caches_are_updated_in_place(compiled, way):
    program = compiled[way]
    assert program.alias_bytes == program.cache_bytes
    assert program.schedule.large_copies == ()
    assert program.temp_bytes <= 4 * program.staging_bytes


@needs_compiler
@compiled_step
def test_temporaries_do_not_grow_with_the_caches(compiled):
    assert compiled["twice the blocks"].temp_bytes <= 1.01 * compiled["both ways"].temp_bytes


@needs_compiler
@with_plants
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(compiled, plant):
    program = compiled[plant]
    beside = {way: [one.products_beside for one in program.schedule.transfers if one.direction == way] for way in WAYS}
    if plant == "late fetch":
        assert 2 * sum(products > 1 for products in beside[TO_DEVICE]) < TRANSFERS
    if plant == "settled at once":
        assert 2 * sum(products > 1 for products in beside[TO_HOST]) < TRANSFERS
    if plant == "no donation":
        assert program.alias_bytes == 0
    if plant in ("no donation", "an old cache returned"):
        assert program.schedule.large_copies

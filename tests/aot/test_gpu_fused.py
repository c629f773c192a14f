"""What the CUDA compiler makes of a decoder's step with fused transfers: 8 layers, full and sliding in turn.

Lowering runs everywhere. Compiling to sm_90a code runs where the compiler is installed. XLA:GPU keeps only a few
transfers in flight, and those of both directions together: in a step that moves one way, most run beside a layer; in
one that moves both ways, all are asynchronous and no more is promised.
"""

import functools

import pytest

from tests.aot.fused_programs import PLANTS, SIZES, Compiled
from tests.aot.gpu import missing
from tests.aot.overlap import TO_DEVICE, TO_HOST
from tests.aot.tpu import run_child
from tests.support.fused_step import LEAVES

MODULE = "tests.aot.fused_programs"
TRANSFERS = SIZES.num_layers * len(LEAVES)
WAYS = {"both ways": (TO_DEVICE, TO_HOST), TO_DEVICE: (TO_DEVICE,), TO_HOST: (TO_HOST,)}
needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))
every_way = pytest.mark.parametrize("way", WAYS)


@functools.cache
def compiled() -> dict[str, Compiled]:
    return {name: Compiled.from_json(one) for name, one in run_child(MODULE, "gpu", timeout_s=900).items()}


def test_the_lowered_step_crosses_once_for_each_leaf_and_re_uses_every_cache():
    assert run_child(MODULE, "gpu lowered") == {TO_DEVICE: TRANSFERS, TO_HOST: TRANSFERS, "aliased": TRANSFERS}


@needs_compiler
@every_way
def test_all_transfers_are_asynchronous(way):
    found = compiled()[way].schedule
    assert found.synchronous == ()
    for direction in (TO_DEVICE, TO_HOST):
        expected = TRANSFERS if direction in WAYS[way] else 0
        assert sum(one.direction == direction for one in found.transfers) == expected


@needs_compiler
@pytest.mark.parametrize("direction", [TO_DEVICE, TO_HOST])
def test_most_transfers_of_one_direction_run_beside_the_products_of_a_layer(direction):
    found = compiled()[direction].schedule
    own = min(own for _, own in found.products)
    beside = [one.products_beside >= own - 1 for one in found.transfers]
    assert 2 * sum(beside) >= TRANSFERS


@needs_compiler
@every_way
def test_caches_are_updated_in_place(way):
    program = compiled()[way]
    assert program.alias_bytes == program.cache_bytes
    assert program.schedule.large_copies == ()
    assert program.temp_bytes <= 4 * program.staging_bytes


@needs_compiler
def test_temporaries_do_not_grow_with_the_caches():
    assert compiled()["twice the blocks"].temp_bytes <= 1.01 * compiled()["both ways"].temp_bytes


@needs_compiler
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant):
    program = compiled()[plant]
    beside = {way: [one.products_beside for one in program.schedule.transfers if one.direction == way] for way in WAYS}
    if plant == "late fetch":
        assert 2 * sum(products > 1 for products in beside[TO_DEVICE]) < TRANSFERS
    if plant == "settled at once":
        assert 2 * sum(products > 1 for products in beside[TO_HOST]) < TRANSFERS
    if plant == "no donation":
        assert program.alias_bytes == 0
    if plant in ("no donation", "an old cache returned"):
        assert program.schedule.large_copies

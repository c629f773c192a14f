"""What the TPU compilers make of the kernels: nothing is copied that the caller did not ask for."""

from typing import Any

import pytest

from pallas_kernels._tpu_blocks import fills_tiles
from tests.aot.children import Child
from tests.aot.tpu import NO_LIBTPU, TARGETS
from tests.aot.tpu_kernels import CASES, COMPARED_IN_SIZE, LARGE, LEAVES, POOL_UNITS, SMALL, Case, kernel_case

if NO_LIBTPU:
    pytest.skip(NO_LIBTPU, allow_module_level=True)

HBM_AND_HOST = {0, 5}
OF_KERNELS = 2**20  # bytes of temporaries, such as ids, that do not depend on what moves


@pytest.fixture(scope="module", params=[Child("tests.aot.tpu_kernels", (target,)) for target in TARGETS])
def compiled(request, children) -> dict[str, Any]:
    """What the compiler of a target made."""
    return children.result(request.param)


def case_of(compiled: dict[str, Any], name: str) -> Case:
    found = compiled[name]
    assert not isinstance(found, str), found
    return Case.from_json(found)


def faults(case: Case) -> list[str]:
    """What is wrong with a compiled program.

    A copy to or from the memory on the chip (VMEM, CMEM) is left out: the compiler may take a leaf that fits there
    through it where XLA gathers or scatters its blocks.
    """
    program, found = case.program, []
    if (program.alias_bytes, program.host_alias_bytes) != (case.donated_bytes, case.host_donated_bytes):
        found.append("something donated is not updated in place")
    if program.temp_bytes > 4 * case.staging_bytes + OF_KERNELS or program.host_temp_bytes:
        found.append("temporaries are large")
    large = program.copies_of(case.leaf_bytes)
    if any({copy.source.space, copy.target.space} <= HBM_AND_HOST for copy in large):
        found.append("a cache or pool is copied")
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_donated_is_updated_in_place_and_nothing_large_is_made(compiled, name):
    assert faults(case_of(compiled, name)) == []


@pytest.mark.parametrize(("name", "group"), COMPARED_IN_SIZE)
def test_temporaries_do_not_grow_with_the_cache(compiled, name, group):
    small, large = (case_of(compiled, kernel_case(name, group, cache_bytes)) for cache_bytes in (SMALL, LARGE))
    assert large.leaf_bytes > 7 * small.leaf_bytes
    assert large.program.temp_bytes <= small.program.temp_bytes + 4096


@pytest.mark.parametrize("size", POOL_UNITS)
@pytest.mark.parametrize("name", ["store", "load"])
def test_units_pass_between_staging_and_pool_without_any_temporary(compiled, name, size):
    program = case_of(compiled, f"{name}, pool of {size}, 1 devices").program
    assert program.temp_bytes == program.host_temp_bytes == 0


def test_a_dropped_donation_is_found(compiled):
    assert "something donated is not updated in place" in faults(case_of(compiled, "nothing donated"))


def test_an_extra_copy_is_found(compiled):
    assert faults(case_of(compiled, "read after the copy")) == ["temporaries are large", "a cache or pool is copied"]


def test_a_kernel_reaches_exactly_what_the_compiler_keeps_in_row_major_order(compiled):
    assert compiled["row major"] == [fills_tiles(leaf) for leaf in LEAVES]

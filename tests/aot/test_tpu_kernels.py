"""What the TPU compilers make of the kernels: nothing is copied that the caller did not ask for."""

from functools import cache
from typing import Any

import pytest

from pallas_kernels._tpu_blocks import fills_tiles
from tests.aot.tpu import NO_LIBTPU, TARGETS, run_child
from tests.aot.tpu_kernels import CASES, LEAVES, POOL_UNITS, Case

if NO_LIBTPU:
    pytest.skip(NO_LIBTPU, allow_module_level=True)

HBM_AND_HOST = {0, 5}


@cache
def compiled(target: str) -> dict[str, Any]:
    """What the child process found."""
    return run_child("tests.aot.tpu_kernels", target, timeout_s=1200)


def case_of(target: str, name: str) -> Case:
    found = compiled(target)[name]
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
    if program.temp_bytes > 4 * case.staging_bytes or program.host_temp_bytes:
        found.append("temporaries are large")
    large = program.copies_of(case.leaf_bytes)
    if any({copy.source.space, copy.target.space} <= HBM_AND_HOST for copy in large):
        found.append("a cache or pool is copied")
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_donated_is_updated_in_place_and_nothing_large_is_made(target: str, name: str):
    assert faults(case_of(target, name)) == []


@pytest.mark.parametrize("name", ["copy", "copy within", "pack", "unpack"])
@pytest.mark.parametrize("target", TARGETS)
def test_temporaries_do_not_grow_with_the_cache(target: str, name: str):
    small, large = case_of(target, f"{name}, small cache"), case_of(target, f"{name}, RPA v3, bf16, 1 devices")
    assert large.leaf_bytes == 8 * small.leaf_bytes
    assert large.program.temp_bytes <= small.program.temp_bytes + 4096


@pytest.mark.parametrize("size", POOL_UNITS)
@pytest.mark.parametrize("name", ["store", "load"])
@pytest.mark.parametrize("target", TARGETS)
def test_units_pass_between_staging_and_pool_without_any_temporary(target: str, name: str, size: str):
    program = case_of(target, f"{name}, pool of {size}, 1 devices").program
    assert program.temp_bytes == program.host_temp_bytes == 0


@pytest.mark.parametrize("target", TARGETS)
def test_a_dropped_donation_is_found(target: str):
    assert "something donated is not updated in place" in faults(case_of(target, "nothing donated"))


@pytest.mark.parametrize("target", TARGETS)
def test_an_extra_copy_is_found(target: str):
    assert faults(case_of(target, "read after the copy")) == ["temporaries are large", "a cache or pool is copied"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_reaches_exactly_what_the_compiler_keeps_in_row_major_order(target: str):
    assert compiled(target)["row major"] == [fills_tiles(leaf) for leaf in LEAVES]

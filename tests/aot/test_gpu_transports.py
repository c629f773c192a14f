"""What CUDA's compilers make of the transports' programs, with caches of 1 and 8 GiB on one device and on four.

Lowering runs everywhere. Compiling to sm_90a code runs where the compiler is installed.
"""

import pytest

from tests.aot.children import Child, Children
from tests.aot.compiled import Program
from tests.aot.gpu import missing
from tests.aot.transports import Case, faults

MODULE = "tests.aot.gpu_transports"
needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))


LOWERED, COMPILED = ([Child(MODULE, (how, num_devices)) for num_devices in ("1", "4")] for how in ("lower", "compile"))


def compiled(children: Children, child: Child) -> dict[str, Case]:
    found = children.result(child)
    return {name: Case(**(case | {"program": Program.from_json(case["program"])})) for name, case in found.items()}


@pytest.mark.parametrize("child", LOWERED)
def test_programs_are_lowered_to_kernels_that_take_what_is_donated(children, child):
    cases = children.result(child)
    assert len(cases) >= 19
    for name, case in cases.items():
        assert case["aliased"] == case["donated"], name
        assert (case["kernels"] > 0) == any(word in name for word in ("pack of", "unpack of", "copy ")), name


@needs_compiler
@pytest.mark.parametrize(("child", "lowered"), list(zip(COMPILED, LOWERED, strict=True)))
def test_every_program_works_in_place_within_bounds(children, child, lowered):
    cases = compiled(children, child)
    assert {name: faults(case) for name, case in cases.items() if faults(case)} == {}
    assert cases.keys() == children.result(lowered).keys()


@needs_compiler
@pytest.mark.parametrize("child", COMPILED)
def test_a_pool_is_aliased_in_full_and_made_without_device_memory(children, child):
    cases = compiled(children, child)
    for name, case in cases.items():
        if name.endswith("to the pool"):
            assert case.program.host_alias_bytes == case.pool_bytes > 0, name
        if "pool" in name:
            assert case.program.temp_bytes < 2**20, name
    assert sum("pool" in name for name in cases) >= 3

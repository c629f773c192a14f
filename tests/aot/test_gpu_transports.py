"""What CUDA's compilers make of the transports' programs, with caches of 1 and 8 GiB on one device and on four.

Lowering runs everywhere. Compiling to sm_90a code runs where the compiler is installed.
"""

from functools import cache
from typing import Any

import pytest

from tests.aot.compiled import Program
from tests.aot.gpu import missing
from tests.aot.tpu import run_child
from tests.aot.transports import Case, faults

MODULE = "tests.aot.gpu_transports"
needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@cache
def lowered(num_devices: int) -> dict[str, Any]:
    return run_child(MODULE, "lower", str(num_devices))


@cache
def compiled(num_devices: int) -> dict[str, Case]:
    found = run_child(MODULE, "compile", str(num_devices), timeout_s=600)
    return {name: Case(**(case | {"program": Program.from_json(case["program"])})) for name, case in found.items()}


@pytest.mark.parametrize("num_devices", [1, 4])
def test_programs_are_lowered_to_kernels_that_take_what_is_donated(num_devices):
    cases = lowered(num_devices)
    assert len(cases) >= 19
    for name, case in cases.items():
        assert case["aliased"] == case["donated"], name
        assert (case["kernels"] > 0) == any(word in name for word in ("pack of", "unpack of", "copy ")), name


@needs_compiler
@pytest.mark.parametrize("num_devices", [1, 4])
def test_every_program_works_in_place_within_bounds(num_devices):
    cases = compiled(num_devices)
    assert {name: faults(case) for name, case in cases.items() if faults(case)} == {}
    assert cases.keys() == lowered(num_devices).keys()


@needs_compiler
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_pool_is_aliased_in_full_and_made_without_device_memory(num_devices):
    cases = compiled(num_devices)
    for name, case in cases.items():
        if name.endswith("to the pool"):
            assert case.program.host_alias_bytes == case.pool_bytes > 0, name
        if "pool" in name:
            assert case.program.temp_bytes < 2**20, name
    assert sum("pool" in name for name in cases) >= 3

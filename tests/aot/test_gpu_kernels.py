"""What the CUDA compiler makes of the Mosaic GPU kernels, for caches and pools of 1 and 8 GiB.

Lowering runs everywhere. Compiling to sm_90a code runs where the compiler is installed.
"""

import re
from typing import Any

import pytest

from tests.aot.children import Child, Children
from tests.aot.gpu import missing
from tests.aot.gpu_kernels import ROW_BYTES, Compiled, Lowered

MODULE = "tests.aot.gpu_kernels"
SMALL = 16384  # tables of pointers, ids and the count
VIEWS = {"parameter", "bitcast", "tuple", "get-tuple-element"}
needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))


LOWERED = [Child(MODULE, ("lower", num_devices)) for num_devices in ("1", "4")]
COMPILED = [Child(MODULE, ("compile", num_devices)) for num_devices in ("1", "4")]
PLANTED = Child(MODULE, ("plant", "1"))
PTX = Child(MODULE, ("ptx", "1"))


@pytest.fixture
def facts(request: pytest.FixtureRequest, children: Children) -> dict[str, Any]:
    """What a child printed."""
    return children.result(request.param)


@pytest.fixture
def compiled(facts: dict[str, Any]) -> dict[str, Compiled]:
    return {name: Compiled.from_json(case) for name, case in facts.items()}


def assert_in_place(case: Compiled) -> None:
    """All donated memory is re-used, only kernels make large arrays, and there is no other memory.

    Where blocks are taken out of the cache first, the memory for them may be filled, and the fill be copied.
    """
    assert case.program.alias_bytes == case.donated_bytes
    assert case.program.host_alias_bytes == case.host_donated_bytes
    assert case.program.output_bytes <= case.donated_bytes + SMALL
    assert case.program.host_output_bytes == case.host_donated_bytes
    assert case.program.temp_bytes <= case.temp_bytes + SMALL
    assert case.program.host_temp_bytes == 0
    assert [copy for copy in case.program.copies if copy.target.num_bytes > case.temp_bytes] == []
    assert set(case.large) <= VIEWS | {"custom-call"}


@pytest.mark.parametrize("facts", LOWERED, indirect=True)
def test_kernels_are_lowered_in_place_and_without_work_around_them(facts):
    cases = {name: Lowered(**(case | {"ops": tuple(case["ops"])})) for name, case in facts.items()}
    without_donation = cases.pop("donation dropped")
    assert len(cases) > 80
    for name, case in cases.items():
        within = name.startswith("copy within")  # there, as many kernels take the blocks out first
        assert case.aliased == case.donated, name
        assert case.updated == case.donated * (1 + within), name
        assert set(case.ops) - ({"iota"} if within else set()) <= {
            "bitcast_convert",
            "broadcast_in_dim",
            "constant",
            "custom_call",
            "minimum",
            "reshape",
        }, name
    assert without_donation.aliased == 0


@needs_compiler
@pytest.mark.parametrize("facts", COMPILED, indirect=True)
def test_kernels_are_compiled_in_place_without_copies(compiled):
    assert len(compiled) > 80
    for name, case in compiled.items():
        print(name)  # names the case that fails
        assert_in_place(case)


@needs_compiler
@pytest.mark.parametrize("facts", COMPILED[:1], indirect=True)
def test_temporaries_do_not_grow_with_the_caches(compiled):
    temporaries = {name: case.program.temp_bytes for name, case in compiled.items()}
    for name, num_bytes in temporaries.items():
        if name.endswith("8 GiB"):
            assert num_bytes <= temporaries[name.removesuffix("8 GiB") + "1 GiB"], name


@needs_compiler
@pytest.mark.parametrize("mistake", ["donation dropped", "reads what it writes", "touches the cache"])
@pytest.mark.parametrize("facts", [PLANTED], indirect=True)
def test_a_planted_mistake_is_found(compiled, mistake):
    with pytest.raises(AssertionError):
        assert_in_place(compiled[mistake])


@needs_compiler
@pytest.mark.parametrize("facts", [PTX], indirect=True)
def test_blocks_are_found_in_64_bits_and_moved_in_vectors_of_16_bytes(facts):
    (text,) = facts.values()
    assert len(re.findall(rf"mul\.wide\.s32\s+%rd\d+, %r\d+, {ROW_BYTES};", text)) == 2
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) == 8
    assert len(re.findall(r"st\.global\.v4\.b32", text)) == 8

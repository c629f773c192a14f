"""What TPU compilers make of the transports' programs, with caches of 1 and 8 GiB on one device and on four."""

import pytest

from tests.aot.children import Child, Children
from tests.aot.compiled import Program
from tests.aot.tpu import NO_LIBTPU, TARGETS
from tests.aot.transports import Case, faults

pytestmark = pytest.mark.skipif(NO_LIBTPU is not None, reason=NO_LIBTPU or "")
MODULE = "tests.aot.tpu_transports"
CHILDREN = [Child(MODULE, (target,)) for target in TARGETS]
PLANTED = Child(MODULE, (TARGETS[1], "planted"))


def cases_of(children: Children, child: Child) -> dict[str, Case]:
    found = children.result(child)
    return {name: Case(**(case | {"program": Program.from_json(case["program"])})) for name, case in found.items()}


@pytest.fixture(scope="module", params=CHILDREN)
def cases(request, children):
    return cases_of(children, request.param)


def test_every_program_works_in_place_within_bounds(cases):
    assert {name: faults(case) for name, case in cases.items() if faults(case)} == {}


def test_there_is_a_program_for_every_layout_transport_and_number_of_devices(cases):
    for layout, devices, transfer in [
        ("gemma", 1, "staged"),
        ("gemma", 1, "direct"),
        ("gemma", 4, "staged"),
        ("gemma", 4, "direct"),
        ("mla", 1, "direct"),
        ("mla", 4, "staged"),
    ]:
        names = [name for name in cases if name.startswith(f"{layout} on {devices}, ") and f" {transfer}: " in name]
        wanted = ("unpack", "pack", "pool") if transfer == "direct" else ("unpack", "pack", "cut", "put")
        assert all(any(want in name for name in names) for want in wanted), (layout, devices, transfer)


def test_a_pool_is_aliased_in_full_and_never_copied(cases):
    moved = {name: case for name, case in cases.items() if name.endswith(("to the pool", "from the pool"))}
    assert len(moved) == 6, sorted(moved)
    for name, case in moved.items():
        if name.endswith("to the pool"):
            assert case.program.host_alias_bytes == case.pool_bytes > 0, name
        assert case.program.temp_bytes < 2**20, name


def test_making_a_pool_takes_no_device_memory(cases):
    made = [case.program for name, case in cases.items() if name.endswith("a pinned pool")]
    assert made
    assert all(program.temp_bytes < 2**20 and program.host_output_bytes > 2**29 for program in made)


def test_temporaries_do_not_grow_with_the_caches(cases):
    compared = 0
    for name, case in cases.items():
        large = cases.get(name.replace(", 1 GiB,", ", 8 GiB,"))
        if large is not None and large is not case:
            assert large.cache_bytes > 7 * case.cache_bytes
            assert large.program.temp_bytes <= case.program.temp_bytes + 2**16, name
            compared += 1
    assert compared >= 8


@pytest.mark.parametrize("child", [PLANTED])
def test_planted_faults_are_seen(children, child):
    assert {name: bool(faults(case)) for name, case in cases_of(children, child).items()} == {
        "the donation of a cache is dropped": True,
        "the donation of the pool is dropped": True,
        "a cache is copied": True,
        "a pool is made on the device": True,
    }

"""`kvjax doctor`: what it says of transports and limits, that its test of transports finds what is wrong."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

import jax
import pytest

import kvjax as package
from kvjax.cli import doctor, doctor_budget, doctor_probe
from kvjax.cli.doctor_limits import describe_limits, limit_warnings
from kvjax.memory import host, limits, transports
from kvjax.memory.inplace import InPlaceTransport
from kvjax.memory.limits import AvailableMemory
from kvjax.memory.staged import StagedTransport
from tests.cli.command import document, full, kvjax, refusal, saved, sliding

GIB = 2**30
ROOMY = AvailableMemory(64 * GIB, ())
GEOMETRY = {"groups": [full("global", 16, 65536), sliding("local", 16, 64, 24576)]}


@pytest.fixture(autouse=True)
def roomy(monkeypatch):
    """What the doctor says must not hang on the machine that the tests run on, nor on what is installed there."""
    monkeypatch.setattr(host, "available_memory", lambda: ROOMY)
    monkeypatch.setattr(limits, "available_memory", lambda _root=None: ROOMY)
    monkeypatch.setattr(doctor, "_RUNTIMES", ())


def in_json(*argv, code=0):
    """Runs the doctor with `--json` and returns its exit code's document."""
    ran = kvjax("doctor", *argv, "--json")
    assert ran.code == code, ran
    assert ran.out.count("\n") == 1
    return json.loads(ran.out)


def by_name(found):
    return {one["transfer"]: one for one in found["transports"]}


def test_both_transports_work_here_and_auto_takes_the_direct_one():
    found = document("doctor")
    assert found["transports"] == [
        {"transfer": "direct", "available": True, "reason": None, "auto": True, "tested": "ok"},
        {"transfer": "staged", "available": True, "reason": None, "auto": False, "tested": "ok"},
    ]
    assert found["platform"] == "cpu"
    assert found["devices"] == [
        {
            "device_kind": "cpu",
            "platform": "cpu",
            "num_devices": jax.local_device_count(),
            "memory_kinds": ["device", "pinned_host", "unpinned_host"],
        }
    ]
    assert (found["versions"]["kvjax"], found["versions"]["jax"]) == (package.__version__, jax.__version__)
    assert (found["granule_bytes"], found["budget"], found["warnings"]) == (4, None, [])
    assert sorted(found["limits"]) == ["huge_pages", "locked_bytes", "mappings", "memory", "pinned"]


def test_without_the_test_nothing_moves(monkeypatch):
    monkeypatch.setattr(doctor_probe, "Mover", None)
    found = document("doctor", "--no-test")
    assert [one["tested"] for one in found["transports"]] == [None, None]
    assert [one["auto"] for one in found["transports"]] == [True, False]


def test_people_get_every_fact_on_a_line_of_its_own():
    ran = kvjax("doctor", "--host-bytes", "1GiB")
    assert (ran.code, ran.err) == (0, "")
    lines = {line[:18].strip(): line[18:] for line in ran.out.splitlines()}
    assert lines["platform"] == "cpu"
    assert lines["memory available"] == "68,719,476,736 B (64 GiB), which is what the machine has"
    assert lines["host pool"] == "1,073,741,824 B (1 GiB): fits"
    assert re.search(r"^direct +yes +yes +ok +- *$", ran.out, re.MULTILINE)
    assert re.search(r"^staged +yes +no +ok +- *$", ran.out, re.MULTILINE)


# --- transports that cannot be taken, or do wrong ---------------------------------------------------------


def test_a_transport_that_the_machine_refuses_is_not_tried_and_says_why(monkeypatch):
    make, made = doctor_probe.Mover, []

    def mover(*args, transfer, **more):
        made.append(transfer)
        return make(*args, transfer=transfer, **more)

    monkeypatch.setattr(doctor_probe, "Mover", mover)
    monkeypatch.setattr("kvjax.memory.transports.donation_refusal", lambda _device: "arrays move about")
    assert in_json()["transports"] == [
        {"transfer": "direct", "available": False, "reason": "arrays move about", "auto": False, "tested": None},
        {"transfer": "staged", "available": True, "reason": None, "auto": True, "tested": "ok"},
    ]
    assert made == ["staged"]


def test_on_a_tpu_auto_passes_the_direct_transport_over(monkeypatch):
    monkeypatch.setattr("kvjax.memory.direct.refusal", lambda *_: None)
    caches = SimpleNamespace(platform="tpu")
    assert transports.refusal(caches, None, 1) is None
    assert transports.auto_refusal(caches, None, 1) == "it has not been shown to be faster on a TPU"
    assert transports.auto_refusal(SimpleNamespace(platform="gpu"), None, 1) is None


def test_a_transport_that_auto_passes_over_is_tried_and_says_why(monkeypatch):
    monkeypatch.setattr(doctor_probe, "auto_refusal", lambda *_: "it has not been shown to be faster on a TPU")
    assert in_json()["transports"] == [
        {
            "transfer": "direct",
            "available": True,
            "reason": "it has not been shown to be faster on a TPU",
            "auto": False,
            "tested": "ok",
        },
        {"transfer": "staged", "available": True, "reason": None, "auto": True, "tested": "ok"},
    ]


def test_a_transport_whose_programs_do_not_start_is_not_available(monkeypatch):
    """On an accelerator that shows only when they are compiled."""
    make = doctor_probe.Mover

    def mover(*args, transfer, **more):
        if transfer == "direct":
            raise ValueError("`transfer` must not be 'direct' here: Mosaic failed to compile")
        return make(*args, transfer=transfer, **more)

    monkeypatch.setattr(doctor_probe, "Mover", mover)
    direct, staged = in_json()["transports"]
    assert (direct["available"], direct["reason"], direct["tested"]) == (False, "Mosaic failed to compile", None)
    assert (staged["auto"], staged["tested"]) == (True, "ok")


def test_if_what_auto_takes_moves_nothing_the_exit_code_says_so_although_the_other_works(monkeypatch):
    monkeypatch.setattr(InPlaceTransport, "load", lambda _self, _caches, moves: [(moves.num_chunks, None)])
    ran = kvjax("doctor", "--json")
    found = json.loads(ran.out)
    direct, staged = found["transports"]
    wrong = r"wrong bytes in blocks \[(\d, ){3}\d\] of leaf 'keys_values', of which \[.*\] were loaded"
    assert re.fullmatch(wrong, direct["tested"])
    assert (direct["auto"], staged["tested"], ran.code) == (True, "ok", 1)
    warning = "the direct transport, which auto takes, failed its test: do not use it"
    assert ran.err == f"kvjax doctor: warning: {warning}\n"
    assert found["warnings"] == [warning]


@pytest.mark.parametrize("leaf", ["keys_values", "state"])
def test_one_wrong_bit_in_a_block_that_was_not_loaded_is_found(monkeypatch, leaf):
    load = StagedTransport.load
    untouched = []

    def spoiled(self, caches, moves):
        yield from load(self, caches, moves)
        if leaf in self._caches.group_leaves[moves.group_idx]:
            untouched[:] = sorted(set(range(10)) - set(moves.block_ids.ravel().tolist()))
            words = jax.lax.bitcast_convert_type(caches[leaf], "uint16" if leaf == "keys_values" else "uint32")
            words = words.at[untouched[0], 1, 2, 3].set(words[untouched[0], 1, 2, 3] ^ 1)
            caches[leaf] = jax.lax.bitcast_convert_type(words, caches[leaf].dtype)

    monkeypatch.setattr(StagedTransport, "load", spoiled)
    found = in_json()
    assert by_name(found)["staged"]["tested"].startswith(f"wrong bytes in blocks [{untouched[0]}] of leaf {leaf!r}")
    assert found["warnings"] == ["the staged transport failed its test: do not use it"]


def test_if_no_transport_works_the_exit_code_says_so(monkeypatch):
    def broken(*_):
        raise RuntimeError("out of\nmemory " + "x " * 1000)

    monkeypatch.setattr(InPlaceTransport, "store", broken)
    monkeypatch.setattr(StagedTransport, "store", broken)
    found = in_json(code=1)
    for one in found["transports"]:
        assert one["tested"].startswith("RuntimeError: out of memory x x")
        assert len(one["tested"]) <= 400


def test_a_transport_that_does_not_close_is_found(monkeypatch):
    def stuck(_self):
        raise RuntimeError("the last program failed")

    monkeypatch.setattr(StagedTransport, "close", stuck)
    assert by_name(in_json())["staged"]["tested"] == "RuntimeError: the last program failed"


def test_a_store_that_loses_the_pool_is_found(monkeypatch):
    monkeypatch.setattr(host.HostMemory, "write", lambda *_: None)
    assert "wrong bytes" in by_name(in_json())["staged"]["tested"]


def test_the_test_shows_progress_on_standard_error_only(monkeypatch):
    monkeypatch.setattr("kvjax.observe.progress.Console.is_terminal", True)
    ran = kvjax("doctor", "--json")
    assert "kvjax doctor" in ran.err
    assert "100%" in ran.err
    assert ran.out.count("\n") == 1


# --- a budget ---------------------------------------------------------------------------------------------


def test_a_budget_that_fits_is_cut_into_units(tmp_path):
    found = document("doctor", saved(tmp_path, GEOMETRY), "--host-bytes", "1GiB", "--no-test")["budget"]
    assert found.pop("pool_bytes") == found["num_units"] * found["unit_bytes"] <= GIB
    assert found.pop("num_units") == GIB // found["unit_bytes"]
    assert found.pop("unit_bytes") < 24576
    assert found == {"host_bytes": GIB, "fits": True, "problems": []}


def test_the_chunks_of_a_budget_can_be_chosen(tmp_path):
    argv = ("doctor", saved(tmp_path, GEOMETRY), "--host-bytes", "1GiB", "--no-test")
    assert document(*argv, "--blocks-per-chunk", "global=1,local=8")["budget"]["unit_bytes"] == 65536


def test_without_a_geometry_a_budget_has_no_units():
    assert document("doctor", "--host-bytes", "1GiB", "--no-test")["budget"] == {
        "host_bytes": GIB,
        "unit_bytes": None,
        "num_units": None,
        "pool_bytes": GIB,
        "fits": True,
        "problems": [],
    }


def test_a_budget_above_the_memory_does_not_fit():
    problem = "a host pool of 68719476737 bytes needs more memory than the 68719476736 bytes available on this machine"
    found = in_json("--host-bytes", 64 * GIB + 1, "--no-test", code=1)["budget"]
    assert (found["fits"], found["problems"]) == (False, [problem])
    ran = kvjax("doctor", "--host-bytes", 64 * GIB + 1, "--no-test")
    assert ran.code == 1
    assert ran.out.endswith(f"B (64.00 GiB): does not fit\n                  {problem}\n")


def test_a_budget_below_one_chunk_does_not_fit(tmp_path):
    found = in_json(saved(tmp_path, GEOMETRY), "--host-bytes", "60KiB", "--no-test", code=1)["budget"]
    (problem,) = found["problems"]
    assert problem == "`host_bytes` must hold at least one chunk of the largest group, 'global': 65536 bytes, got 61440"


def test_on_a_gpu_a_budget_above_what_xla_pins_names_the_variable(monkeypatch):
    monkeypatch.delenv(limits.PINNED_LIMIT_VARIABLE, raising=False)
    monkeypatch.setattr(host, "available_memory", lambda: AvailableMemory(128 * GIB, ()))
    found = doctor_budget.describe_budget(80 * GIB, None, "gpu", 256, "direct")
    (problem,) = found["problems"]
    assert problem.startswith(f"`host_bytes` must be at most {64 * GIB}, XLA's limit of pinned memory, got {80 * GIB}")
    assert limits.PINNED_LIMIT_VARIABLE in problem
    assert doctor_budget.describe_budget(80 * GIB, None, "gpu", 256, "staged")["fits"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--host-bytes", "0"), "`--host-bytes` must be a positive int, got 0"),
        (("--host-bytes", "64GB"), "argument --host-bytes: a size must be digits with an optional B, KiB, MiB"),
        (("--tp", "2"), "--tp is for a GEOMETRY, and none is given"),
        (("--blocks-per-chunk", "2"), "--blocks-per-chunk is for a GEOMETRY, and none is given"),
        (("--tokens-per-block", "2", "--host-bytes", "1GiB"), "--tokens-per-block is for a GEOMETRY"),
        (("GEOMETRY",), "a GEOMETRY is checked against a budget: give it with --host-bytes"),
        (("GEOMETRY", "--host-bytes", "1GiB", "--blocks-per-chunk", "nope=2"), "'nope'"),
        (("GEOMETRY", "--host-bytes", "1GiB", "--tp", "2"), "--tp is for a model's config.json"),
        (("missing.json", "--host-bytes", "1GiB"), "'missing.json' does not exist"),
        (("--colour",), "unrecognized arguments: --colour"),
    ],
)
def test_bad_input_is_one_line(tmp_path, argv, message):
    geometry = saved(tmp_path, GEOMETRY)
    assert message in refusal("doctor", *(geometry if arg == "GEOMETRY" else arg for arg in argv))


# --- limits and warnings ----------------------------------------------------------------------------------


def limits_of(**changed):
    found = {
        "memory": {"available_bytes": 32 * GIB, "machine_bytes": 32 * GIB, "bound": "machine", "control_groups": []},
        "pinned": {"limit_bytes": None, "variable": limits.PINNED_LIMIT_VARIABLE, "problem": None},
        "locked_bytes": 8 * 2**20,
        "mappings": {"used": 600, "limit": 65530},
        "huge_pages": "madvise",
    }
    return found | changed


GROUP = {
    "folder": "/sys/fs/cgroup/serving",
    "limit": "memory.max",
    "limit_bytes": 8 * GIB,
    "used_bytes": 5 * GIB,
    "available_bytes": 3 * GIB,
}
IN_GROUP = {
    "available_bytes": 3 * GIB,
    "machine_bytes": 32 * GIB,
    "bound": "/sys/fs/cgroup/serving",
    "control_groups": [GROUP],
}
PINNED = {"limit_bytes": 64 * GIB, "variable": limits.PINNED_LIMIT_VARIABLE, "problem": None}
ROOM = {"available_bytes": 500 * GIB, "machine_bytes": 500 * GIB, "bound": "machine", "control_groups": []}
UNKNOWN = {"available_bytes": None, "machine_bytes": None, "bound": None, "control_groups": []}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_limits_that_do_not_bite_give_no_warning(platform):
    assert limit_warnings(limits_of(), platform) == []
    assert limit_warnings(limits_of(mappings={"used": None, "limit": None}, locked_bytes=None), platform) == []
    assert limit_warnings(limits_of(pinned=PINNED), platform) == []
    loose = IN_GROUP | {"available_bytes": 32 * GIB, "bound": "machine"}
    assert limit_warnings(limits_of(memory=loose), platform) == []


@pytest.mark.parametrize(
    ("platform", "changed", "warning"),
    [
        (
            "cpu",
            {"memory": IN_GROUP},
            "the control group /sys/fs/cgroup/serving leaves 3 GiB of the 32 GiB available on this machine: keep the "
            "host pool below that, or raise its memory.max of 8 GiB",
        ),
        (
            "cpu",
            {"memory": UNKNOWN},
            "the memory available is unknown: a host pool that is too large will not be refused",
        ),
        (
            "gpu",
            {"memory": ROOM, "pinned": PINNED},
            "XLA pins at most 64 GiB of the 500 GiB available: for a larger host pool, set "
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB to more GiB before JAX starts, or choose `transfer='staged'`",
        ),
        (
            "gpu",
            {"pinned": PINNED | {"limit_bytes": None, "problem": "`X` must be a whole number of GiB, got 'many'"}},
            "`X` must be a whole number of GiB, got 'many': until then `transfer` must be 'staged'",
        ),
        (
            "tpu",
            {},
            "this process may lock 8 MiB of memory, and what a TPU's driver pins through VFIO counts against that: "
            "raise it with `ulimit -l`, or `--ulimit memlock=-1` of a container",
        ),
        (
            "cpu",
            {"mappings": {"used": 52424, "limit": 65530}},
            "this process has 52,424 of the 65,530 memory mappings that it may have: raise the sysctl vm.max_map_count",
        ),
    ],
)
def test_a_limit_that_bites_says_what_to_do(platform, changed, warning):
    assert limit_warnings(limits_of(**changed), platform) == [warning]


@pytest.mark.parametrize("locked", ["unlimited", None])
def test_a_tpu_with_nothing_known_against_locking_gives_no_warning(locked):
    assert limit_warnings(limits_of(locked_bytes=locked), "tpu") == []


def test_limits_are_read_below_a_root(monkeypatch, tmp_path):
    monkeypatch.undo()
    for name, text in {
        "proc/meminfo": f"MemAvailable: {32 * 2**20} kB\n",
        "proc/self/cgroup": "0::/serving\n",
        "proc/self/mountinfo": "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "proc/self/limits": f"Max locked memory {8 * 2**20} unlimited bytes\n",
        "proc/self/maps": "one\n" * 600,
        "proc/sys/vm/max_map_count": "65530\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/fs/cgroup/serving/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/serving/memory.current": f"{5 * GIB}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = describe_limits("gpu", root=tmp_path, environment={})
    assert found == limits_of(memory=IN_GROUP, pinned=PINNED)
    odd = describe_limits("gpu", root=tmp_path, environment={limits.PINNED_LIMIT_VARIABLE: "many"})
    assert odd["pinned"]["limit_bytes"] is None
    assert "got 'many'" in odd["pinned"]["problem"]


def test_a_system_that_tells_nothing_leaves_the_transports_working(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_RUNTIMES", ())
    monkeypatch.setattr(host, "available_memory", lambda: AvailableMemory(None, ()))
    monkeypatch.setattr(doctor, "describe_limits", partial(describe_limits, root=tmp_path))
    ran = kvjax("doctor")
    assert ran.code == 0
    assert ran.err == (
        "kvjax doctor: warning: the memory available is unknown: a host pool that is too large will not be refused\n"
    )
    lines = {line[:18].strip(): line[18:] for line in ran.out.splitlines()}
    for name in ("memory available", "locked memory", "huge pages"):
        assert lines[name] == "unknown"
    assert lines["mappings"] == "unknown of at most unknown (vm.max_map_count)"


def test_a_group_that_binds_is_shown_and_warned_of(monkeypatch):
    found = limits_of(memory=IN_GROUP, pinned=PINNED)
    monkeypatch.setattr(doctor, "describe_limits", lambda _platform: found)
    ran = kvjax("doctor", "--no-test")
    lines = {line[:18].strip(): line[18:] for line in ran.out.splitlines()}
    assert lines["memory available"].endswith("(3 GiB), bound by /sys/fs/cgroup/serving")
    assert lines["control group"] == "/sys/fs/cgroup/serving: memory.max 8 GiB, of which 5 GiB are used"
    assert lines["pinned memory"] == "at most 64 GiB, set by XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    assert ran.err.startswith("kvjax doctor: warning: the control group /sys/fs/cgroup/serving leaves 3 GiB of")


def test_what_tiers_metrics_and_pictures_need_is_told():
    extras = in_json("--no-test")["extras"]
    assert {"tensorstore", "redis", "prometheus_client", "matplotlib"} <= extras.keys()
    assert extras["tensorstore"] == version("tensorstore")


@pytest.mark.parametrize(("platforms", "warned"), [("", True), ("cpu", False), ("tpu,cpu", False)])
def test_a_cpu_beside_a_runtime_of_accelerators_is_warned_of(monkeypatch, platforms, warned):
    monkeypatch.setattr(doctor, "_RUNTIMES", ("numpy",))
    monkeypatch.setattr(doctor, "_EXTRAS", ("numpy", "no-such-package"))
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    found = in_json("--no-test")
    warning = "JAX runs on the CPU although numpy is installed: it found no device for that"
    assert found["warnings"] == ([warning] if warned else [])
    assert found["extras"]["no-such-package"] is None


# --- a machine where JAX does not start -------------------------------------------------------------------


def ran_alone(*argv, redirected="", **environment):
    """Runs the doctor in a process and shell of its own."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-m", "kvjax", "doctor", *argv],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_backend_that_jax_does_not_know_is_one_line():
    done = ran_alone("--json", JAX_PLATFORMS="nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvjax doctor: error: JAX cannot start the backend of JAX_PLATFORMS='nonsense': ")


def test_a_backend_that_does_not_start_is_bad_input(monkeypatch):
    """Without the plugin of a GPU, JAX's error has no text."""

    def failing():
        raise AssertionError

    nothing_asked = SimpleNamespace(jax_platforms=None)
    monkeypatch.setattr(doctor_probe, "jax", SimpleNamespace(local_devices=failing, config=nothing_asked))
    monkeypatch.setattr(doctor, "_version", lambda _name: None)
    started = r"kvjax doctor: error: JAX cannot start the backend( of JAX_PLATFORMS='cpu')?: AssertionError; "
    assert re.fullmatch(started + "packages for accelerators installed: none", refusal("doctor"))


def test_a_device_without_memory_is_bad_input(monkeypatch):
    def failing(*_args, **_more):
        raise RuntimeError("RESOURCE_EXHAUSTED: another process\nholds it")

    monkeypatch.setattr(jax, "device_put", failing)
    message = "RuntimeError: RESOURCE_EXHAUSTED: another process holds it"
    assert refusal("doctor").endswith(f"JAX cannot put a small cache on {jax.local_devices()[0]}: {message}")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_an_output_that_cannot_be_written_is_one_line():
    done = ran_alone("--no-test", redirected="> /dev/full", JAX_PLATFORMS="cpu")
    assert done.returncode == 1
    assert done.stderr.endswith("kvjax: error: standard output cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr

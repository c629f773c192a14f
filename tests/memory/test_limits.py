"""Limits of memory, read from trees of files that stand for `/proc` and `/sys`."""

import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.memory.limits import (
    PINNED_LIMIT_VARIABLE,
    AvailableMemory,
    GroupLimit,
    Mappings,
    available_memory,
    huge_pages,
    locked_limit_bytes,
    mappings,
    pinned_limit_bytes,
)

MIB = 2**20
GIB = 2**30
MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   16777216 kB\nSwapFree: 0 kB\n"
V2_MOUNT = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "33 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
)
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max core file size        0                    unlimited            bytes     \n"
    "Max locked memory         {}              unlimited            bytes     \n"
    "Max address space         unlimited            unlimited            bytes     \n"
)


def tree(folder, files):
    """Writes files by their absolute paths below a folder, and returns it."""
    for path, content in files.items():
        place = folder / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    return folder


def machine(folder, files, *, mounts=V2_MOUNT, cgroup="0::/a/b\n", meminfo=MEMINFO):
    system = {"/proc/meminfo": meminfo, "/proc/self/mountinfo": mounts, "/proc/self/cgroup": cgroup}
    return tree(folder, system | {f"/sys/fs/cgroup/{name}": content for name, content in files.items()})


def test_without_a_limit_the_machine_bounds(tmp_path):
    root = machine(tmp_path, {"a/b/memory.max": "max\n", "a/b/memory.high": "max\n", "a/b/memory.current": 5 * GIB})
    memory = available_memory(root)
    assert memory == AvailableMemory(16 * GIB, ())
    assert (memory.num_bytes, memory.binding_group, memory.bound) == (16 * GIB, None, "on this machine")


def test_a_control_group_bounds_by_what_it_has_left(tmp_path):
    files = {"a/b/memory.max": f"{8 * GIB}\n", "a/b/memory.high": "max\n", "a/b/memory.current": f"{5 * GIB}\n"}
    memory = available_memory(machine(tmp_path, files))
    group = GroupLimit("/sys/fs/cgroup/a/b", "memory.max", 8 * GIB, 5 * GIB)
    assert memory == AvailableMemory(16 * GIB, (group,))
    assert (memory.num_bytes, memory.binding_group) == (3 * GIB, group)
    assert memory.bound == f"in the control group /sys/fs/cgroup/a/b (memory.max is {8 * GIB})"


def test_page_cache_of_a_group_that_the_kernel_drops_first_counts_as_available(tmp_path):
    stat = f"anon {GIB}\nfile {4 * GIB}\nactive_file {GIB}\ninactive_file {3 * GIB}\n"
    files = {"a/b/memory.max": 8 * GIB, "a/b/memory.current": 5 * GIB, "a/b/memory.stat": stat}
    (group,) = available_memory(machine(tmp_path, files)).groups
    assert (group.used_bytes, group.available_bytes) == (2 * GIB, 6 * GIB)


def test_every_group_up_to_the_root_bounds(tmp_path):
    files = {
        "a/b/memory.max": 8 * GIB,
        "a/b/memory.current": GIB,
        "a/memory.max": 10 * GIB,
        "a/memory.current": 9 * GIB,
        "memory.max": 100 * GIB,
        "memory.current": 50 * GIB,
        "a/memory.stat": "inactive_file 0\n",
        "elsewhere/memory.max": 1,
    }
    memory = available_memory(machine(tmp_path, files))
    assert [group.folder for group in memory.groups] == [
        "/sys/fs/cgroup/a/b",
        "/sys/fs/cgroup/a",
        "/sys/fs/cgroup",
    ]
    assert memory.num_bytes == GIB
    assert memory.bound == f"in the control group /sys/fs/cgroup/a (memory.max is {10 * GIB})"


@pytest.mark.parametrize(
    ("most", "high", "limit"),
    [
        (8 * GIB, 6 * GIB, ("memory.high", 6 * GIB)),
        (8 * GIB, 9 * GIB, ("memory.max", 8 * GIB)),
        ("max", 6 * GIB, ("memory.high", 6 * GIB)),
        (8 * GIB, "max", ("memory.max", 8 * GIB)),
    ],
)
def test_the_lower_of_both_limits_of_a_group_counts(tmp_path, most, high, limit):
    files = {"a/b/memory.max": most, "a/b/memory.high": high, "a/b/memory.current": GIB}
    (group,) = available_memory(machine(tmp_path, files)).groups
    assert (group.name, group.limit_bytes) == limit


def test_a_group_above_its_limit_leaves_nothing(tmp_path):
    files = {"a/b/memory.max": GIB, "a/b/memory.current": 2 * GIB}
    assert available_memory(machine(tmp_path, files)).num_bytes == 0


def test_a_group_of_a_container_is_found_at_the_mount_point(tmp_path):
    """With a namespace of control groups of its own, a process sees its group as the root."""
    files = {"memory.max": 4 * GIB, "memory.current": GIB}
    assert available_memory(machine(tmp_path, files, cgroup="0::/\n")).num_bytes == 3 * GIB


@pytest.mark.parametrize(("mounted", "path"), [("/docker/1", "/elsewhere"), ("/docker/1", "/../2"), ("/", "/../2")])
def test_a_group_outside_of_what_is_mounted_is_bounded_by_the_mount_point(tmp_path, mounted, path):
    mounts = V2_MOUNT.replace("0:26 /", f"0:26 {mounted}")
    files = {"memory.max": 4 * GIB, "memory.current": GIB, "memory.stat": "", "../memory.max": 1}
    memory = available_memory(machine(tmp_path, files, mounts=mounts, cgroup=f"0::{path}\n"))
    assert [group.folder for group in memory.groups] == ["/sys/fs/cgroup"]


def test_groups_of_version_1_bound(tmp_path):
    files = {
        "memory/docker/1/memory.limit_in_bytes": 8 * GIB,
        "memory/docker/1/memory.usage_in_bytes": 5 * GIB,
        "memory/docker/1/memory.stat": f"inactive_file {GIB}\ntotal_inactive_file {2 * GIB}\n",
        "memory/docker/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "cpu/docker/1/memory.limit_in_bytes": 1,
    }
    cgroup = "9:name=systemd:/\n5:memory,hugetlb:/docker/1\n2:cpu:/docker/1\n0::/\n"
    memory = available_memory(machine(tmp_path, files, mounts=V1_MOUNTS, cgroup=cgroup))
    name = "memory.limit_in_bytes"
    assert memory.groups == (GroupLimit("/sys/fs/cgroup/memory/docker/1", name, 8 * GIB, 3 * GIB),)
    assert memory.num_bytes == 5 * GIB


def test_of_a_mounted_part_the_groups_path_is_taken_from_there(tmp_path):
    """A container of version 1 sees the host's paths, and only its own group's files."""
    mounts = V1_MOUNTS.replace("0:32 / ", "0:32 /docker/1 ")
    files = {"memory/memory.limit_in_bytes": 8 * GIB, "memory/memory.usage_in_bytes": GIB}
    memory = available_memory(machine(tmp_path, files, mounts=mounts, cgroup="5:memory:/docker/1\n"))
    assert memory.num_bytes == 7 * GIB


def test_both_versions_at_once_bound(tmp_path):
    mounts = V1_MOUNTS + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    files = {
        "memory/a/memory.limit_in_bytes": 8 * GIB,
        "unified/b/memory.max": 6 * GIB,
    }
    memory = available_memory(machine(tmp_path, files, mounts=mounts, cgroup="5:memory:/a\n0::/b\n"))
    assert [group.folder for group in memory.groups] == ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/unified/b"]
    assert memory.num_bytes == 6 * GIB


def test_a_mount_point_with_a_space_and_a_group_with_a_colon_are_found(tmp_path):
    mounts = "29 23 0:26 / /sys/fs/cgroup/of\\040mine rw - cgroup2 none rw\n"
    files = {"of mine/a:b/memory.max": GIB}
    memory = available_memory(machine(tmp_path, files, mounts=mounts, cgroup="0::/a:b\n"))
    assert [group.folder for group in memory.groups] == ["/sys/fs/cgroup/of mine/a:b"]


def test_a_limit_whose_usage_is_unknown_still_bounds(tmp_path):
    assert available_memory(machine(tmp_path, {"a/b/memory.max": GIB})).num_bytes == GIB


def test_a_group_bounds_where_the_machine_is_unknown(tmp_path):
    memory = available_memory(machine(tmp_path, {"a/b/memory.max": GIB}, meminfo=""))
    assert (memory.machine_bytes, memory.num_bytes) == (None, GIB)
    assert memory.bound.startswith("in the control group")


def test_nothing_is_known_of_an_empty_system(tmp_path):
    assert available_memory(tmp_path) == AvailableMemory(None, ())
    assert available_memory(tmp_path).num_bytes is None
    assert locked_limit_bytes(tmp_path) is None
    assert mappings(tmp_path) == Mappings(None, None)
    assert huge_pages(tmp_path) is None


ODD = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"0::\n",
            b"0::/\0\n",
            b"5:memory\n",
            b"MemAvailable: 99999999999999999999 kB\n",
            b"29 23 0:26 / /sys/fs/cgroup rw - cgroup2\n",
            b"29 23 0:26 / /sys\\000 rw - cgroup2 none rw\n",
            b"29 - cgroup2 cgroup2 rw\n",
            b"-1\n",
            b"9" * 30,
            "٣\n".encode(),
            b"1 2\n",
        ]
    ),
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "proc/meminfo",
                "proc/self/cgroup",
                "proc/self/mountinfo",
                "proc/self/limits",
                "proc/self/maps",
                "proc/sys/vm/max_map_count",
                "sys/kernel/mm/transparent_hugepage/enabled",
                "sys/fs/cgroup/memory.max",
                "sys/fs/cgroup/memory.high",
                "sys/fs/cgroup/memory.current",
                "sys/fs/cgroup/memory.stat",
            ]
        ),
        ODD,
    )
)
def test_odd_files_never_crash(tmp_path_factory, files):
    standing = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT, "sys/fs/cgroup/memory.max": GIB}
    root = tree(tmp_path_factory.mktemp("system"), standing | files)
    memory = available_memory(root)
    assert memory.num_bytes is None or memory.num_bytes >= 0
    assert memory.bound
    locked_limit_bytes(root), mappings(root), huge_pages(root)


@pytest.mark.parametrize(
    "mounts",
    ["29 - cgroup2 cgroup2 rw\n", "29 23 0:26 / - cgroup2\n", " - cgroup2 x y\n", "29 23 0:26 / /sys/fs/cgroup\n"],
)
def test_a_line_of_mounts_that_is_cut_short_is_passed_over(tmp_path, mounts):
    assert available_memory(machine(tmp_path, {"a/b/memory.max": GIB}, mounts=mounts)).groups == ()


def test_names_that_are_no_utf_8_do_not_hide_the_rest_of_a_file(tmp_path):
    root = tree(tmp_path, {"/proc/self/maps": b"7f0-7f1 r-xp 0 00:00 1 /caf\xe9\n" * 3})
    assert mappings(root).used == 3


def test_files_that_are_folders_are_unknown(tmp_path):
    for name in ("proc/meminfo", "proc/self/cgroup", "proc/self/maps", "proc/self/limits"):
        (tmp_path / name).mkdir(parents=True)
    assert available_memory(tmp_path) == AvailableMemory(None, ())
    assert mappings(tmp_path) == Mappings(None, None)
    assert locked_limit_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("word", "limit"), [("8388608", 8 * MIB), ("0", 0), ("unlimited", "unlimited"), ("some", None)]
)
def test_the_limit_of_locked_memory_is_the_soft_one(tmp_path, word, limit):
    assert locked_limit_bytes(tree(tmp_path, {"/proc/self/limits": LIMITS.format(word)})) == limit


def test_mappings_are_counted(tmp_path):
    maps = "7f0-7f1 r-xp 00000000 00:00 0\n" * 37
    root = tree(tmp_path, {"/proc/self/maps": maps, "/proc/sys/vm/max_map_count": "65530\n"})
    assert mappings(root) == Mappings(37, 65530)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("always [madvise] never\n", "madvise"),
        ("[always] madvise never\n", "always"),
        ("always madvise [never]", "never"),
    ],
)
def test_the_setting_of_huge_pages_is_the_one_in_brackets(tmp_path, text, setting):
    assert huge_pages(tree(tmp_path, {"/sys/kernel/mm/transparent_hugepage/enabled": text})) == setting


@pytest.mark.skipif(not os.path.exists("/proc/self/limits"), reason="this system has no /proc to compare with")
def test_what_this_system_tells_is_read():
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert locked_limit_bytes() == ("unlimited" if soft == resource.RLIM_INFINITY else soft)
    assert 0 < (mappings().used or 0) <= (mappings().limit or 0)
    assert (available_memory().num_bytes or 0) > 0


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm"])
def test_xla_pins_64_gib_on_a_gpu_by_default(platform):
    assert pinned_limit_bytes(platform, {}) == 64 * GIB


@pytest.mark.parametrize(("text", "gib"), [("1", 1), ("128", 128), (" 512 ", 512), ("0", 0)])
def test_the_variable_sets_what_xla_pins(text, gib):
    assert pinned_limit_bytes("gpu", {PINNED_LIMIT_VARIABLE: text}) == gib * GIB


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_elsewhere_xla_has_no_limit_whatever_the_variable_says(platform):
    assert pinned_limit_bytes(platform, {PINNED_LIMIT_VARIABLE: "many"}) is None


@pytest.mark.parametrize("text", ["", "many", "64GB", "1.5", "-1", "6_4", "٦٤"])
def test_a_variable_that_is_no_number_is_refused(text):
    with pytest.raises(ValueError, match=f"^`{PINNED_LIMIT_VARIABLE}` must be a whole number of GiB, got {text!r}$"):
        pinned_limit_bytes("gpu", {PINNED_LIMIT_VARIABLE: text})

"""Limits that the system sets on memory: what it has, what control groups allow, what may be pinned or mapped.

What the kernel tells is read from its files below a root. What is missing, cannot be read or makes no sense is
unknown, `None`, and never an error.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from kvjax._checks import shown

PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_PINNED_LIMIT_GB = 64  # of XLA's allocator of pinned memory, openxla/xla xla/pjrt/gpu/gpu_helpers.cc
_ROOT = Path("/")
_UNLIMITED_BYTES = 2**62  # a version 1 group without a limit holds the largest multiple of a page below 2**63
_COUNT = re.compile(r"\s*([0-9]{1,20})\s*")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a space, say, in a path of mountinfo


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """A limit that a control group sets on the memory of all its processes together.

    Args:
        folder: the group's folder, such as `/sys/fs/cgroup/serving`.
        name: the file in it that holds the limit: `memory.max`, `memory.high` or `memory.limit_in_bytes`.
        limit_bytes: the limit.
        used_bytes: what counts against it now, without page cache that the kernel drops first (inactive files).
    """

    folder: str
    name: str
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        """What the group may still take."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Memory that this process could still take.

    Args:
        machine_bytes: of the whole machine, without swapping; `None` if unknown.
        groups: the limits of the process's control groups, from its own up to the root.
    """

    machine_bytes: int | None
    groups: tuple[GroupLimit, ...]

    @property
    def binding_group(self) -> GroupLimit | None:
        """The control group that leaves least, if that is less than the machine has."""
        group = min(self.groups, key=lambda group: group.available_bytes, default=None)
        if group is None or (self.machine_bytes is not None and self.machine_bytes <= group.available_bytes):
            return None
        return group

    @property
    def num_bytes(self) -> int | None:
        """The least that the machine and the groups leave; `None` if unknown."""
        group = self.binding_group
        return self.machine_bytes if group is None else group.available_bytes

    @property
    def bound(self) -> str:
        """Where that much is available, in words."""
        group = self.binding_group
        if group is None:
            return "on this machine"
        return f"in the control group {group.folder} ({group.name} is {group.limit_bytes})"


@dataclass(frozen=True, slots=True)
class Mappings:
    """Memory mappings of this process.

    Args:
        used: how many there are; `None` if unknown.
        limit: how many there may be; `None` if unknown.
    """

    used: int | None
    limit: int | None


def available_memory(root: Path = _ROOT) -> AvailableMemory:
    """Returns the memory that this process could still take.

    Args:
        root: the folder that holds `proc`, and below which all mounts lie.
    """
    found = re.search(r"^MemAvailable:\s*([0-9]{1,16}) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return AvailableMemory(None if found is None else int(found[1]) * 1024, tuple(_group_limits(root)))


def locked_limit_bytes(root: Path = _ROOT) -> int | Literal["unlimited"] | None:
    """Returns how many bytes this process may lock in memory (`RLIMIT_MEMLOCK`, the soft limit)."""
    found = re.search(r"^Max locked memory\s+([0-9]{1,20}|unlimited)\s", _text(root / "proc/self/limits"), re.MULTILINE)
    if found is None:
        return None
    return "unlimited" if found[1] == "unlimited" else int(found[1])


def mappings(root: Path = _ROOT) -> Mappings:
    """Returns how many memory mappings this process has, and may have (`vm.max_map_count`)."""
    lines = _text(root / "proc/self/maps").count("\n")
    return Mappings(lines or None, _count(root / "proc/sys/vm/max_map_count"))


def huge_pages(root: Path = _ROOT) -> str | None:
    """Returns when anonymous memory gets huge pages: `"always"`, `"madvise"` (NumPy's large arrays do) or `"never"`."""
    found = re.search(r"\[([a-z]+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return None if found is None else found[1]


def pinned_limit_bytes(platform: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns how many bytes XLA may pin on a platform; `None` is no limit of XLA's own.

    Raises:
        ValueError: the variable that sets it holds no number.
    """
    if platform not in ("gpu", "cuda", "rocm"):
        return None
    text = environment.get(PINNED_LIMIT_VARIABLE, str(_DEFAULT_PINNED_LIMIT_GB))
    found = _COUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"`{PINNED_LIMIT_VARIABLE}` must be a whole number of GiB, got {shown(text)}")
    return int(found[1]) * 2**30


def _group_limits(root: Path) -> Iterator[GroupLimit]:
    """Yields the limits of the groups of this process, of both versions, each from its own up to the root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            limit_of, mount = _unified_limit, _mount(root, "cgroup2", None)
        elif "memory" in controllers.split(","):
            limit_of, mount = _legacy_limit, _mount(root, "cgroup", "memory")
        else:
            continue
        if mount is None:
            continue
        for folder in _folders(*mount, path):
            limit = limit_of(root, folder)
            if limit is not None:
                yield limit


def _mount(root: Path, kind: str, option: str | None) -> tuple[str, str] | None:
    """Which part of a hierarchy of control groups is mounted, and where."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, source = line.partition(" - ")
        words, (found_kind, _, options) = fields.split(), (*source.split(), "", "", "")[:3]
        if len(words) > 4 and found_kind == kind and (option is None or option in options.split(",")):
            return _unescaped(words[3]), _unescaped(words[4])
    return None


def _folders(mounted: str, mount_point: str, path: str) -> Iterator[str]:
    """Yields the folders of a group and those above it, as far as they are mounted.

    A group that lies outside of what is mounted has none of its own there: then only the mount point is looked at.
    """
    group, top = PurePosixPath(path), PurePosixPath(mounted)
    inside = group.is_relative_to(top) and ".." not in group.parts
    parts = group.relative_to(top).parts if inside else ()
    for depth in range(len(parts), -1, -1):
        yield str(PurePosixPath(mount_point, *parts[:depth]))


def _unified_limit(root: Path, folder: str) -> GroupLimit | None:
    """The lower limit of a group of version 2: where it is killed (`max`), or slowed down until it frees (`high`)."""
    place = root / folder.lstrip("/")
    limits = {name: _count(place / name) for name in ("memory.max", "memory.high")}
    set_ones = [(limit, name) for name, limit in limits.items() if limit is not None]
    if not set_ones:
        return None
    limit, name = min(set_ones, key=lambda one: one[0])
    return GroupLimit(folder, name, limit, _used(place, "memory.current", "inactive_file"))


def _legacy_limit(root: Path, folder: str) -> GroupLimit | None:
    """The limit of a group of version 1."""
    place, name = root / folder.lstrip("/"), "memory.limit_in_bytes"
    limit = _count(place / name)
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    return GroupLimit(folder, name, limit, _used(place, "memory.usage_in_bytes", "total_inactive_file"))


def _used(place: Path, usage: str, droppable: str) -> int:
    """Bytes that a group uses and the kernel cannot just drop; what is unknown counts as unused."""
    found = re.search(rf"^{droppable} ([0-9]{{1,20}})$", _text(place / "memory.stat"), re.MULTILINE)
    return max(0, (_count(place / usage) or 0) - (0 if found is None else int(found[1])))


def _count(path: Path) -> int | None:
    found = _COUNT.fullmatch(_text(path))
    return None if found is None else int(found[1])


def _text(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # a path that no file can have is a `ValueError`
        return ""


def _unescaped(path: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), path)

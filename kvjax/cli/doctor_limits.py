"""What `kvjax doctor` says of the limits of memory, and when one is likely to bite. No JAX."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.cli.render import human_bytes
from kvjax.memory import limits

_FULL = 0.8  # of the mappings that a process may have


def describe_limits(
    platform: str, *, root: Path = Path("/"), environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the limits of this process, `None` where one is unknown.

    Args:
        platform: the platform of the devices.
        root: see `kvjax.memory.limits`.
        environment: environment variables; `None` takes those of the process.
    """
    memory = limits.available_memory(root)
    group = memory.binding_group
    pinned, problem = None, None
    try:
        pinned = limits.pinned_limit_bytes(platform, *(() if environment is None else (environment,)))
    except ValueError as error:
        problem = str(error)
    mappings = limits.mappings(root)
    return {
        "memory": {
            "available_bytes": memory.num_bytes,
            "machine_bytes": memory.machine_bytes,
            "bound": None if memory.num_bytes is None else "machine" if group is None else group.folder,
            "control_groups": [
                {
                    "folder": one.folder,
                    "limit": one.name,
                    "limit_bytes": one.limit_bytes,
                    "used_bytes": one.used_bytes,
                    "available_bytes": one.available_bytes,
                }
                for one in memory.groups
            ],
        },
        "pinned": {
            "limit_bytes": pinned,
            "variable": limits.PINNED_LIMIT_VARIABLE,
            "problem": problem,
        },
        "locked_bytes": limits.locked_limit_bytes(root),
        "mappings": {"used": mappings.used, "limit": mappings.limit},
        "huge_pages": limits.huge_pages(root),
    }


def limit_warnings(found: Mapping[str, Any], platform: str) -> list[str]:
    """Returns which limits are likely to bite and what to do about each, one sentence each.

    Args:
        found: see `describe_limits`.
        platform: the platform of the devices.
    """
    return [*_memory_warnings(found), *_pinned_warnings(found, platform), *_mapping_warnings(found)]


def _memory_warnings(found: Mapping[str, Any]) -> list[str]:
    memory = found["memory"]
    if memory["available_bytes"] is None:
        return ["the memory available is unknown: a host pool that is too large will not be refused"]
    for group in memory["control_groups"]:
        if group["folder"] == memory["bound"] and memory["machine_bytes"] is not None:
            return [
                f"the control group {group['folder']} leaves {human_bytes(group['available_bytes'])} of the "
                f"{human_bytes(memory['machine_bytes'])} available on this machine: keep the host pool below that, or "
                f"raise its {group['limit']} of {human_bytes(group['limit_bytes'])}"
            ]
    return []


def _pinned_warnings(found: Mapping[str, Any], platform: str) -> list[str]:
    pinned, available, locked = found["pinned"], found["memory"]["available_bytes"], found["locked_bytes"]
    warnings = []
    if pinned["problem"] is not None:
        warnings.append(f"{pinned['problem']}: until then `transfer` must be 'staged'")
    elif pinned["limit_bytes"] is not None and (available is None or pinned["limit_bytes"] < available):
        of = "" if available is None else f" of the {human_bytes(available)} available"
        warnings.append(
            f"XLA pins at most {human_bytes(pinned['limit_bytes'])}{of}: for a larger host pool, set "
            f"{pinned['variable']} to more GiB before JAX starts, or choose `transfer='staged'`"
        )
    if platform == "tpu" and isinstance(locked, int):
        warnings.append(
            f"this process may lock {human_bytes(locked)} of memory, and what a TPU's driver pins through VFIO counts "
            "against that: raise it with `ulimit -l`, or `--ulimit memlock=-1` of a container"
        )
    return warnings


def _mapping_warnings(found: Mapping[str, Any]) -> list[str]:
    used, limit = found["mappings"]["used"], found["mappings"]["limit"]
    if used is None or limit is None or used < _FULL * limit:
        return []
    return [
        f"this process has {used:,} of the {limit:,} memory mappings that it may have: raise the sysctl "
        "vm.max_map_count"
    ]

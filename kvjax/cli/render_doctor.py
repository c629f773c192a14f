"""What `kvjax doctor` prints for people."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from kvjax.cli.render import both_bytes, human_bytes
from kvjax.cli.tables import new_console

_NAMES = 18  # columns of the names on the left
_UNKNOWN = "unknown"


def print_doctor(document: Mapping[str, Any]) -> None:
    """Prints what was found, as `kvjax.cli.doctor` gathers it."""
    console = new_console()
    for name, value in _machine(document):
        console.print(_text(f"{name:<{_NAMES}}{value}"))
    console.print()
    console.print(_transports(document))
    console.print()
    for name, value in [*_limits(document), *_budget(document)]:
        console.print(_text(f"{name:<{_NAMES}}{value}"))


def _machine(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "platform", document["platform"]
    for kind in document["devices"]:
        yield "devices", f"{kind['num_devices']} x {kind['device_kind']}, memory: {', '.join(kind['memory_kinds'])}"
    yield "versions", _named(document["versions"])
    extras = document["extras"]
    yield "extras", _named({name: version for name, version in extras.items() if version is not None}) or "-"
    yield "not installed", ", ".join(name for name, version in extras.items() if version is None) or "-"
    yield "units", f"multiples of {both_bytes(document['granule_bytes'])}"


def _transports(document: Mapping[str, Any]) -> Table:
    headings = ("transport", "available", "auto takes it", "test", "why not")
    table = Table(*headings, box=None, header_style="bold", pad_edge=False)
    for one in document["transports"]:
        table.add_row(
            one["transfer"],
            "yes" if one["available"] else "no",
            "yes" if one["auto"] else "no",
            _text(one["tested"] or "-"),
            _text(one["reason"] or "-"),
        )
    return table


def _limits(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    limits = document["limits"]
    memory, pinned, mappings = limits["memory"], limits["pinned"], limits["mappings"]
    bound = {None: "", "machine": ", which is what the machine has"}.get(
        memory["bound"], f", bound by {memory['bound']}"
    )
    yield "memory available", _bytes(memory["available_bytes"]) + bound
    for group in memory["control_groups"]:
        yield (
            "control group",
            f"{group['folder']}: {group['limit']} {human_bytes(group['limit_bytes'])}, of which "
            f"{human_bytes(group['used_bytes'])} are used",
        )
    if pinned["problem"] is not None:
        yield "pinned memory", _UNKNOWN
    elif pinned["limit_bytes"] is None:
        yield "pinned memory", "no limit of XLA's own"
    else:
        yield "pinned memory", f"at most {human_bytes(pinned['limit_bytes'])}, set by {pinned['variable']}"
    locked = limits["locked_bytes"]
    yield "locked memory", locked if isinstance(locked, str) else _bytes(locked)
    yield "mappings", f"{_number(mappings['used'])} of at most {_number(mappings['limit'])} (vm.max_map_count)"
    yield "huge pages", limits["huge_pages"] or _UNKNOWN


def _budget(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    budget = document["budget"]
    if budget is None:
        return
    units = ""
    if budget["unit_bytes"] is not None:
        units = f", {budget['num_units']:,} units of {both_bytes(budget['unit_bytes'])}"
    yield "host pool", f"{both_bytes(budget['host_bytes'])}{units}: {'fits' if budget['fits'] else 'does not fit'}"
    for problem in budget["problems"]:
        yield "", problem


def _named(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or _UNKNOWN}" for name, version in versions.items())


def _bytes(num_bytes: int | None) -> str:
    return _UNKNOWN if num_bytes is None else both_bytes(num_bytes)


def _number(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"


def _text(text: str) -> Text:
    """Text taken literally, also where standard output cannot spell it."""
    encoding = sys.stdout.encoding or "utf-8"
    return Text(text.encode(encoding, "backslashreplace").decode(encoding))

"""What `kvjax tier` prints for people."""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from kvjax.cli.render import both_bytes, human_bytes
from kvjax.cli.tables import literal, new_console, plain_table

_NAMES = 14  # columns of the names on the left


def print_tier(document: dict[str, Any]) -> None:
    """Prints what an action of `kvjax tier` did or found.

    Args:
        document: as the action's `describe` returns it.
    """
    show: Callable[[dict[str, Any], Console], None] = _ACTIONS[document["action"]]
    show(document, new_console())


def _usage(document: dict[str, Any], console: Console) -> None:
    used = "-" if document["used_bytes"] is None else both_bytes(document["used_bytes"])
    lines = [
        ("tier", document["tier"]),
        ("entries", f"{document['num_entries']:,} of {both_bytes(document['entry_bytes'])}"),
        ("in use", used),
        ("budget", "none" if document["max_bytes"] is None else both_bytes(document["max_bytes"])),
    ]
    _print_lines(lines, console)
    if document["groups"]:
        table = plain_table("namespace", right=("group", "entries", "bytes"))
        for row in document["groups"]:
            numbers = (f"{row['group_idx']}", f"{row['num_entries']:,}", human_bytes(row["num_bytes"]))
            table.add_row(row["namespace"], *numbers)
        console.print()
        console.print(table)


def _inspect(document: dict[str, Any], console: Console) -> None:
    table = plain_table("entry", "group", "as it should be", right=("chunk", "tokens", "bytes"))
    for row in document["entries"]:
        tokens = "-" if row["tokens"] is None else "{:,} to {:,}".format(*row["tokens"])
        state = row["problem"] or {True: "yes", None: "header only"}[row["ok"]]
        table.add_row(
            row["name"],
            literal(f"{row['group_idx']} {_printable(row['group'] or '')}"),
            literal(_printable(state)),
            "-" if row["chunk_idx"] is None else f"{row['chunk_idx']:,}",
            tokens,
            f"{row['num_bytes']:,}",
        )
    console.print(table)
    if document["num_entries"] > len(document["entries"]):
        console.print(literal(f"{len(document['entries']):,} of {document['num_entries']:,} entries; see --limit"))


def _verify(document: dict[str, Any], console: Console) -> None:
    lines = [
        ("tier", document["tier"]),
        ("entries", f"{document['num_entries']:,}"),
        ("good", f"{document['num_good']:,} of {both_bytes(document['good_bytes'])}"),
        ("bad", f"{document['num_bad']:,}{_reasons(document['bad_by_reason'])}"),
        ("not read", f"{document['num_unread']:,}{_reasons(document['unread_by_reason'])}"),
        ("deleted", f"{document['num_deleted']:,}"),
    ]
    _print_lines(lines, console)
    for row in document["bad"]:
        console.print(literal(f"{row['problem']:<{_NAMES}}{row['name']}"))


def _gc(document: dict[str, Any], console: Console) -> None:
    would = "would be " if document["dry_run"] else ""
    lines = [
        ("tier", document["tier"]),
        ("budget", "none" if document["max_bytes"] is None else both_bytes(document["max_bytes"])),
        ("swept", "-" if document["num_swept"] is None else f"{document['num_swept']:,} left by killed writers"),
        ("wrong bytes", f"{document['num_wrong']:,} {would}deleted"),
        ("evicted", f"{document['num_evicted']:,} of {both_bytes(document['evicted_bytes'])} {would}deleted"),
        ("left", f"{document['num_left']:,} of {both_bytes(document['left_bytes'])}"),
    ]
    _print_lines(lines, console)


def _clear(document: dict[str, Any], console: Console) -> None:
    lines = [
        ("tier", document["tier"]),
        ("namespace", document["namespace"] or "all"),
        ("deleted", f"{document['num_deleted']:,} of {both_bytes(document['deleted_bytes'])}"),
        ("swept", f"{document['num_swept']:,} left by killed writers"),
    ]
    _print_lines(lines, console)


def _reasons(counts: dict[str, int]) -> str:
    told = ", ".join(f"{_printable(reason)} {number:,}" for reason, number in counts.items())
    return f" ({told})" if told else ""


def _print_lines(lines: list[tuple[str, str]], console: Console) -> None:
    for name, value in lines:
        console.print(literal(f"{name:<{_NAMES}}{value}"))


def _printable(text: str) -> str:
    """Returns text without what could steer a terminal: entries come from anywhere."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


_ACTIONS = {"usage": _usage, "inspect": _inspect, "verify": _verify, "gc": _gc, "clear": _clear}

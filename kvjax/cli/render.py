"""What the commands print for people."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_WIDE = 200  # columns where standard output is no terminal, so that nothing is folded


def human_bytes(num_bytes: int) -> str:
    """Returns a byte count in the largest unit it reaches.

    >>> human_bytes(65536), human_bytes(2146304)
    ('64 KiB', '2.05 MiB')
    """
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, len(_NAMES) - 1)
    scaled = num_bytes / 1024**power
    return f"{int(scaled)} {_NAMES[power]}" if scaled == int(scaled) else f"{scaled:.2f} {_NAMES[power]}"


def both_bytes(num_bytes: int) -> str:
    """Returns a byte count exactly, and in a larger unit where it reaches one."""
    return f"{num_bytes:,} B" + (f" ({human_bytes(num_bytes)})" if num_bytes >= 1024 else "")


def print_plan(document: dict[str, Any]) -> None:
    """Prints a plan: one row per group, then the sums."""
    table = Table("group", "kind", box=None, header_style="bold", pad_edge=False)
    for heading in ("layers", "tokens/block", "block", "blocks/chunk", "tokens/chunk", "chunk", "units", "padding"):
        table.add_column(heading, justify="right")
    for group in document["groups"]:
        chunk_bytes = group["chunk_bytes"]
        table.add_row(
            _text(group["name"]),
            _kind(group),
            f"{group['num_layers']}",
            f"{group['tokens_per_block']:,}",
            both_bytes(group["block_bytes"]),
            _number(group["blocks_per_chunk"]),
            _number(group["tokens_per_chunk"]),
            "-" if chunk_bytes is None else both_bytes(chunk_bytes),
            _number(group["units_per_chunk"]),
            "-" if chunk_bytes is None else f"{100 * group['padding_bytes'] / chunk_bytes:.2f} %",
        )
    growing = document["bytes_per_token_growing"]
    lines = [
        f"hash unit         {document['tokens_per_hash']:,} tokens",
        f"pool unit         {both_bytes(document['unit_bytes'])}",
        f"growing cache     {both_bytes(growing) if isinstance(growing, int) else f'{growing:,.2f} B'} per token",
    ]
    if document["host"]:
        lines.append(
            f"host memory       {both_bytes(document['host']['budget_bytes'])} holds a prefix of "
            f"{document['host']['tokens']:,} tokens"
        )
    console = _console()
    console.print(table)
    console.print()
    for line in lines:
        console.print(Text(line))


def print_hit(document: dict[str, Any], num_tokens: int) -> None:
    """Prints a hit: its length, the chunks to load as ranges, and what keeps it from being longer."""
    limits = ", ".join(map(repr, document["limited_by"])) or "nothing"
    table = Table("group", "chunks to load", box=None, header_style="bold", pad_edge=False)
    for name, chunks in document["load"].items():
        table.add_row(_text(name), f"{len(chunks):,}: {_ranges(chunks)}" if chunks else "-")
    console = _console()
    console.print(_text(f"hit         {document['hit_tokens']:,} of {num_tokens:,} tokens"))
    console.print(_text(f"limited by  {limits}"))
    console.print()
    console.print(table)


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)


def _text(text: str) -> Text:
    """Text taken literally, also where standard output cannot spell it."""
    encoding = sys.stdout.encoding or "utf-8"
    return Text(text.encode(encoding, "backslashreplace").decode(encoding))


def _kind(group: dict[str, Any]) -> str:
    parts = [group["kind"], *(f"{group[key]:,}" for key in ("window_tokens", "chunk_tokens") if key in group)]
    if group["lookahead_tokens"]:
        parts.append(f"+{group['lookahead_tokens']:,}")
    return " ".join(parts)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _ranges(chunks: list[int]) -> str:
    """Ascending indices as `0-3, 7`."""
    starts = [i for i, chunk in enumerate(chunks) if i == 0 or chunk != chunks[i - 1] + 1]
    stops = [*starts[1:], len(chunks)]
    return ", ".join(
        f"{chunks[a]}" if b - a == 1 else f"{chunks[a]}-{chunks[b - 1]}" for a, b in zip(starts, stops, strict=True)
    )

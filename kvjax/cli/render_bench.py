"""What `kvjax bench` prints for people."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 120  # columns where standard output is no terminal, so that nothing is folded


def print_bench(document: dict[str, Any]) -> None:
    """Prints the figures of a benchmark: one row each, times in milliseconds."""
    table = Table("figure", box=None, header_style="bold", pad_edge=False)
    for heading in ("min ms", "median ms", "plain loop ms", "ratio"):
        table.add_column(heading, justify="right")
    for figure in document["figures"]:
        plain, ratio = figure["plain_ms"], figure["plain_ratio"]
        table.add_row(
            Text(figure["name"].replace("_", " ")),
            _milliseconds(figure["min_ms"]),
            _milliseconds(figure["median_ms"]),
            "-" if plain is None else _milliseconds(plain),
            "-" if ratio is None else f"{ratio:,.1f}",
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    chunks = sum(document["chunks"].values())
    console.print(Text(f"{document['model']}, {document['tokens']:,} tokens, {chunks:,} chunks"))
    console.print()
    console.print(table)


def _milliseconds(value: float) -> str:
    return f"{value:,.3f}" if value < 10 else f"{value:,.1f}"

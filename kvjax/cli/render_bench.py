"""What `kvjax bench` prints for people."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from kvjax.cli.render import human_bytes
from kvjax.cli.render_bench_pool import pool_table
from kvjax.cli.render_bench_tiers import print_tiers
from kvjax.cli.tables import new_console

_WIDE = 120  # columns where standard output is no terminal, so that nothing is folded


def print_bench(document: dict[str, Any]) -> None:
    """Prints the figures of a benchmark: a line of what was measured, and a table."""
    if document["bench"] == "tiers":
        print_tiers(document)
        return
    title, table = {"hit": _hit, "moves": _moves, "miss": _miss, "pool": pool_table}[document["bench"]](document)
    console = new_console(wide=_WIDE)
    console.print(Text(title))
    console.print()
    console.print(table)


def _hit(document: dict[str, Any]) -> tuple[str, Table]:
    rows = []
    for figure in document["figures"]:
        plain, ratio = figure["plain_ms"], figure["plain_ratio"]
        rows.append(
            (
                figure["name"].replace("_", " "),
                _milliseconds(figure["min_ms"]),
                _milliseconds(figure["median_ms"]),
                "-" if plain is None else _milliseconds(plain),
                "-" if ratio is None else f"{ratio:,.1f}",
            )
        )
    chunks = sum(document["chunks"].values())
    title = f"{document['model']}, {document['tokens']:,} tokens, {chunks:,} chunks"
    return title, _table(("figure",), ("min ms", "median ms", "plain loop ms", "ratio"), rows)


def _moves(document: dict[str, Any]) -> tuple[str, Table]:
    rows = [
        (
            row["direction"],
            row["transfer"],
            row["dtype"],
            human_bytes(row["block_bytes"]),
            f"{row['num_blocks']:,}",
            f"{row['num_leaves']:,}",
            f"{row['gb_per_s']:.4g}",
            f"{row['memcpy_gb_per_s']:.4g}",
            f"{row['ratio']:.2g}",
            "yes" if row["exact"] else "no",
        )
        for row in document["rows"]
    ]
    first = document["rows"][0]
    title = f"{first['device']} ({first['backend']}), jax {first['jax']}, medians of {document['repeats']} moves"
    numbers = ("block", "blocks", "leaves", "GB/s", "memcpy GB/s", "ratio", "exact")
    return title, _table(("move", "transfer", "dtype"), numbers, rows)


def _miss(document: dict[str, Any]) -> tuple[str, Table]:
    rows = [
        ("decode step, no offloader", _milliseconds(document["ms_per_step_off"]), ""),
        (
            "decode step, offloader without a hit",
            _milliseconds(document["ms_per_step_on"]),
            _percent(document["cost_percent"]),
        ),
        (
            "of it inside the offloader's calls",
            _milliseconds(document["calls_ms_per_step"]),
            _percent(document["calls_percent"]),
        ),
        (
            f"decode step, store of {human_bytes(document['store_bytes'])} under way",
            _milliseconds(document["ms_per_step_store"]),
            _percent(document["store_cost_percent"]),
        ),
        (
            f"lookup of {document['prompt_tokens']:,} tokens, a miss",
            _milliseconds(document["lookup_ms"]),
            _percent(document["lookup_percent"]),
        ),
    ]
    title = (
        f"{document['device']} ({document['backend']}), jax {document['jax']}, "
        f"{document['layers']} layers of width {document['width']}, medians of {document['steps']} steps"
    )
    return title, _table(("what",), ("ms", "of a step"), rows)


def _table(words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*words, box=None, header_style="bold", pad_edge=False)
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _milliseconds(value: float) -> str:
    return f"{value:,.3f}" if value < 10 else f"{value:,.1f}"


def _percent(value: float) -> str:
    return f"{value:+.2f} %"

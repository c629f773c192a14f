"""What `kvjax bench tiers` prints for people."""

from typing import Any

from kvjax.cli.render import human_bytes
from kvjax.cli.tables import literal, new_console, plain_table


def print_tiers(document: dict[str, Any]) -> None:
    """Prints the figures: a table of moves, one of promotions, and from which prompt on each tier pays."""
    console = new_console()
    machine = f"{document['machine']}, {document['num_cpus']} CPUs"
    console.print(
        literal(f"{machine}, {human_bytes(document['bytes'])} at a time, best of {document['rounds']} rounds")
    )
    console.print()
    headings = ("chunk", "MiB/s", "ms per chunk", "plain file MiB/s", "ratio", "checksum")
    table = plain_table("tier", "move", right=headings)
    for row in document["rows"]:
        table.add_row(
            *_common(row, row["move"]),
            f"{row['plain_mib_per_s']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{100 * row['checksum_share']:.1f} %",
        )
    for row in document["promotions"]:
        table.add_row(*_common(row, "promote"), "-", "-", "-")
    console.print(table)
    if document["prompts"]:
        console.print()
    for found in document["prompts"]:
        first = found["pays_from_tokens"]
        pays = "never, of the prompts measured" if first is None else f"{first:,} tokens"
        console.print(literal(f"{found['tier'] or 'a tier'} pays from: {found['problem'] or pays}"))


def _common(row: dict[str, Any], move: str) -> tuple[Any, ...]:
    chunk = human_bytes(row["chunk_bytes"])
    return literal(row["tier"]), move, chunk, f"{row['mib_per_s']:,.0f}", f"{row['ms_per_chunk']:.3f}"

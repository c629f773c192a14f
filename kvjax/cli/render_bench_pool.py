"""What `kvjax bench pool` prints for people."""

from typing import Any

from rich.table import Table
from rich.text import Text


def pool_table(document: dict[str, Any]) -> tuple[str, Table]:
    """Returns a line of what was measured and a table with a row for each phase."""
    table = Table("phase", box=None, header_style="bold", pad_edge=False)
    runs: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        runs.setdefault((row["resident_chunks"], row["policy"]), {})[row["phase"]] = row
    for num_chunks, policy in runs:
        table.add_column(f"{policy} {num_chunks:,}\nus per chunk", justify="right")
        table.add_column("longest\nms", justify="right")
    for phase in next(iter(runs.values())):
        cells = [Text(phase)]
        for rows in runs.values():
            cells += [Text(f"{rows[phase]['us_per_chunk']:.3f}"), Text(f"{rows[phase]['longest_call_ms']:.3f}")]
        table.add_row(*cells)
    title = (
        f"{document['machine']}, {document['num_cpus']} CPUs, requests of {document['chunks_per_request']} chunks, "
        f"medians of {document['requests']} calls"
    )
    return title, table

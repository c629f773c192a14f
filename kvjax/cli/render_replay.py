"""What `kvjax replay` prints for people."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from kvjax.cli.render import human_bytes
from kvjax.cli.tables import literal, new_console, plain_table


def print_replay(document: dict[str, Any]) -> None:
    """Prints the runs side by side, and the groups of each where there are several.

    Args:
        document: see `kvjax.cli.replay`.
    """
    out = new_console()
    first, trace = document["runs"][0], document["trace"]
    out.print(
        literal(
            f"{trace['requests']:,} requests of {first['lookup_tokens']:,} tokens in {trace['calls']:,} calls, "
            f"{first['device_tokens']:,} tokens on the device"
        )
    )
    out.print()
    out.print(_runs(document["runs"]))
    if len(first["groups"]) > 1:
        out.print()
        out.print(_groups(document["runs"]))


def _runs(runs: Sequence[dict[str, Any]]) -> Table:
    headings = ("budget", "hit rate", "hit tokens", "stored", "loaded", "evicted", "refused\nstores", "peak held")
    table = plain_table("policy", right=(*headings, "mean held"))
    for run in runs:
        table.add_row(
            literal(run["policy"]),
            human_bytes(run["host_bytes"]),
            f"{100 * run['hit_rate']:.2f} %",
            f"{run['hit_tokens']:,}",
            *(human_bytes(run[f"bytes_{what}"]) for what in ("stored", "loaded", "evicted")),
            f"{run['refused_stores']:,}",
            *(human_bytes(run[f"{what}_bytes_held"]) for what in ("peak", "mean")),
        )
    return table


def _groups(runs: Sequence[dict[str, Any]]) -> Table:
    headings = ("budget", "stored", "loaded", "evicted", "evicted\nchunks", "peak held", "mean held")
    table = plain_table("group", "policy", right=headings)
    for place, group in enumerate(runs[0]["groups"]):
        for run in runs:
            one = run["groups"][place]
            table.add_row(
                literal(group["name"]),
                literal(run["policy"]),
                human_bytes(run["host_bytes"]),
                *(human_bytes(one[f"bytes_{what}"]) for what in ("stored", "loaded", "evicted")),
                f"{one['chunks_evicted']:,}",
                *(human_bytes(one[f"{what}_bytes_held"]) for what in ("peak", "mean")),
            )
    return table

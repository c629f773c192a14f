"""`kvjax tier usage`: what a tier holds, by namespace and group."""

import argparse
from typing import Any

from kvjax.cli.tier_open import add_url, opened


def add_parser(actions: Any) -> argparse.ArgumentParser:
    """Adds the action and returns its parser."""
    parser = actions.add_parser(
        "usage",
        help="what a tier holds",
        description="Tells how many entries and bytes a tier holds, by namespace and group; bytes are with frames.",
        allow_abbrev=False,
    )
    add_url(parser)
    return parser


def describe(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Returns the document, and exit code 0.

    Raises:
        ValueError: the URL names no tier, or it does not answer.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    with opened(args.url) as tier:
        usage = tier.usage()
        for name in tier.list():
            counts = groups.setdefault((name.namespace.hex(), name.group_idx), [0, 0])
            counts[0] += 1
            counts[1] += name.num_bytes
    rows = [
        {"namespace": namespace, "group_idx": group_idx, "num_entries": num_entries, "num_bytes": num_bytes}
        for (namespace, group_idx), (num_entries, num_bytes) in sorted(groups.items())
    ]
    document = {
        "action": "usage",
        "tier": tier.name,
        "num_entries": sum(row["num_entries"] for row in rows),
        "entry_bytes": sum(row["num_bytes"] for row in rows),
        "used_bytes": usage.num_bytes,
        "max_bytes": usage.max_bytes,
        "groups": rows,
    }
    return document, 0

"""`kvjax tier clear`: deletes all entries, or those of a namespace."""

import argparse
import sys
from typing import Any

from kvjax.cli.render import human_bytes
from kvjax.cli.tier_open import add_namespace, add_url, opened
from kvjax.cli.tier_verify import deleted

_DESCRIPTION = """\
Deletes all entries of kvjax, or those of one namespace, and what killed writers left behind; without --namespace
empty folders, too. Nothing else in the store is touched. It asks first; where nobody can answer, --yes is needed."""


def add_parser(actions: Any) -> argparse.ArgumentParser:
    """Adds the action and returns its parser."""
    parser = actions.add_parser(
        "clear", help="delete all entries, or those of a namespace", description=_DESCRIPTION, allow_abbrev=False
    )
    add_url(parser)
    add_namespace(parser)
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    return parser


def describe(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Returns the document, and exit code 0.

    Raises:
        ValueError: bad input, nobody agreed, or the tier does not answer.
    """
    if not args.yes and not (sys.stdin and sys.stdin.isatty()):
        raise ValueError("`clear` deletes entries: give --yes, or answer at a terminal")
    with opened(args.url) as tier:
        names = list(tier.list(args.namespace))
        num_bytes = sum(name.num_bytes for name in names)
        if not args.yes and not _agreed(f"delete {len(names):,} entries ({human_bytes(num_bytes)}) of {tier.name}?"):
            raise ValueError("nothing was deleted")
        num_deleted = deleted(tier, names)
        num_swept = tier.sweep() if args.namespace is None else 0
    document = {
        "action": "clear",
        "tier": tier.name,
        "namespace": args.namespace and args.namespace.hex(),
        "num_deleted": num_deleted,
        "deleted_bytes": num_bytes,
        "num_swept": num_swept,
    }
    return document, 0


def _agreed(question: str) -> bool:
    print(f"kvjax tier: {question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")

"""`kvjax tier gc`: clears up what nobody can use, and makes a tier fit its budget."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax._checks import integer
from kvjax.cli.options import size
from kvjax.cli.tier_open import add_namespace, add_url, opened
from kvjax.cli.tier_verify import deleted
from kvjax.tiers.entries import EntryName
from kvjax.tiers.tier import Listed

_DESCRIPTION = """\
Removes what killed writers left behind, deletes entries that have not as many bytes as their names say, and then those
used longest ago until the others fit the budget: --max-bytes, or that of the URL. With --namespace, only entries of
that namespace are looked at, and those together must fit. For processes that use the tier, what is gone is a miss."""


def add_parser(actions: Any) -> argparse.ArgumentParser:
    """Adds the action and returns its parser."""
    parser = actions.add_parser(
        "gc", help="clear up, and evict down to the budget", description=_DESCRIPTION, allow_abbrev=False
    )
    add_url(parser)
    add_namespace(parser)
    parser.add_argument("--max-bytes", type=size, metavar="S", help="budget of all entries (default that of the URL)")
    parser.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    return parser


def describe(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Returns the document, and exit code 0.

    Raises:
        ValueError: bad input, or the tier does not answer.
    """
    given = None if args.max_bytes is None else integer(args.max_bytes, "--max-bytes", at_least=0)
    with opened(args.url) as tier:
        max_bytes = tier.usage().max_bytes if given is None else given
        listed = list(tier.survey(args.namespace))
        wrong = [one.name for one in listed if one.num_bytes not in (None, one.name.num_bytes)]
        victims = surplus([one for one in listed if one.num_bytes in (None, one.name.num_bytes)], max_bytes)
        num_swept = None
        if not args.dry_run:
            num_swept = tier.sweep()
            deleted(tier, [*wrong, *victims])
    document = {
        "action": "gc",
        "tier": tier.name,
        "dry_run": args.dry_run,
        "max_bytes": max_bytes,
        "num_swept": num_swept,
        "num_wrong": len(wrong),
        "num_evicted": len(victims),
        "evicted_bytes": _sum(victims),
        "num_left": len(listed) - len(wrong) - len(victims),
        "left_bytes": _sum(one.name for one in listed) - _sum(wrong) - _sum(victims),
    }
    return document, 0


def surplus(listed: Sequence[Listed], max_bytes: int | None) -> list[EntryName]:
    """Returns the entries used longest ago without which the others have at most `max_bytes` bytes."""
    left = _sum(one.name for one in listed)
    victims: list[EntryName] = []
    for one in sorted(listed, key=lambda one: (one.used_s or 0.0, one.name)):
        if max_bytes is None or left <= max_bytes:
            break
        victims.append(one.name)
        left -= one.name.num_bytes
    return victims


def _sum(names: Iterable[EntryName]) -> int:
    return sum(name.num_bytes for name in names)

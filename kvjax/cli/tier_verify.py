"""`kvjax tier verify`: reads all entries and tells which of them are what was stored."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvjax.cli.options import size
from kvjax.cli.tier_open import add_namespace, add_url, opened
from kvjax.cli.tier_read import DEFAULT_MOST_BYTES, check_whole
from kvjax.tiers.entries import EntryName
from kvjax.tiers.futures import result_of
from kvjax.tiers.tier import Tier

DELETED_AT_A_TIME = 512
_DESCRIPTION = """\
Reads every entry and verifies it: name, header, length and checksum. The exit code is 0 if all are good, 1 if some are
bad or could not be read. With --delete the bad ones are deleted; what could not be read stays."""


def add_parser(actions: Any) -> argparse.ArgumentParser:
    """Adds the action and returns its parser."""
    parser = actions.add_parser(
        "verify", help="read and verify all entries", description=_DESCRIPTION, allow_abbrev=False
    )
    add_url(parser)
    add_namespace(parser)
    parser.add_argument("--delete", action="store_true", help="delete bad entries")
    parser.add_argument(
        "--max-entry-bytes",
        type=size,
        default=DEFAULT_MOST_BYTES,
        metavar="S",
        help="larger entries are not read (default 1GiB)",
    )
    return parser


def describe(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Returns the document, and exit code 0 if all entries are good, else 1.

    Raises:
        ValueError: bad input, or the tier does not answer.
    """
    from kvjax.observe.progress import progress_bar

    num_good = good_bytes = num_deleted = 0
    bad: dict[EntryName, str] = {}
    unread: Counter[str] = Counter()
    with opened(args.url) as tier:
        names = list(tier.list(args.namespace))
        with progress_bar(f"verifying {tier.name}", len(names)) as advance:
            for checked in check_whole(tier, names, args.max_entry_bytes):
                if checked.bad:
                    bad[checked.name] = checked.bad
                elif checked.unread:
                    unread[checked.unread] += 1
                else:
                    num_good += 1
                    good_bytes += checked.name.num_bytes
                advance(1)
        if args.delete:
            num_deleted = deleted(tier, list(bad))
    gone = unread.pop("gone", 0)
    document = {
        "action": "verify",
        "tier": tier.name,
        "num_entries": len(names) - gone,
        "num_good": num_good,
        "good_bytes": good_bytes,
        "num_bad": len(bad),
        "bad_by_reason": dict(Counter(bad.values())),
        "num_unread": unread.total(),
        "unread_by_reason": dict(unread),
        "num_deleted": num_deleted,
        "bad": [{"name": name.text, "problem": reason} for name, reason in bad.items()],
    }
    return document, int(bool(bad or unread))


def deleted(tier: Tier, names: Sequence[EntryName]) -> int:
    """Deletes entries, and returns how many were there.

    Raises:
        TierError: the tier could not; some may be deleted.
    """
    from kvjax.observe.progress import progress_bar

    num_deleted = 0
    with progress_bar(f"deleting from {tier.name}", len(names)) as advance:
        for low in range(0, len(names), DELETED_AT_A_TIME):
            batch = names[low : low + DELETED_AT_A_TIME]
            deadline = time.monotonic() + tier.timeout_s
            num_deleted += result_of(tier.delete(batch, deadline=deadline), deadline)
            advance(len(batch))
    return num_deleted

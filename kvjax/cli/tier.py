"""`kvjax tier`: what a tier below the host pool holds, whether it is right, and how to clear it up.

Every action is a module with `add_parser(actions)` and `describe(args)`, which returns the JSON document that the
command prints, and its exit code.
"""

import argparse
import json
from typing import Any

from kvjax.cli import tier_clear, tier_gc, tier_inspect, tier_usage, tier_verify
from kvjax.cli.options import add_json

_ACTIONS = (tier_usage, tier_inspect, tier_verify, tier_gc, tier_clear)
_DESCRIPTION = """\
A tier is named by its URL, as an offloader takes it: file:///path, s3://bucket/path/, redis://host:port/0 and others.
Nothing is changed by usage, inspect and verify, and whatever is no entry of kvjax is left alone by all. A tier that
does not answer within its `timeout_s` is bad input: exit code 2."""


def add_parser(commands: Any) -> None:
    """Adds the command and its actions."""
    parser = commands.add_parser(
        "tier",
        help="what lower tiers hold: usage, inspect, verify, gc, clear",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in _ACTIONS:
        own = action.add_parser(actions)
        add_json(own)
        own.set_defaults(run=run, describe=action.describe)


def run(args: argparse.Namespace) -> int:
    """Prints what an action did or found, and returns its exit code.

    Raises:
        ValueError: bad input, or the tier does not answer.
    """
    document, code = args.describe(args)
    if args.json:
        print(json.dumps(document))
    else:
        from kvjax.cli import render_tier

        render_tier.print_tier(document)
    return code

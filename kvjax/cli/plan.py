"""`kvjax plan`: how a cache is cut into chunks and units, and how many tokens a host budget holds."""

import argparse
import json
import sys
from fractions import Fraction
from typing import Any

from kvjax.chunking import Chunking, longer_than_window
from kvjax.cli.options import add_chunking, add_json, chunking, integer, read_layout, size
from kvjax.geometry import kind_fields
from kvjax.groups import FullAttention
from kvjax.packing import GRANULE_BYTES, Units, cut_into_units, tokens_that_fit, unit_bytes

_CONFIG_OPTIONS = ("--tokens-per-block", "--tp", "--dtype")


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "plan", help="chunks, units and capacity of a cache", description=__doc__, allow_abbrev=False
    )
    add_chunking(parser)
    parser.add_argument("--host-bytes", type=size, metavar="S", help="host memory to plan for, such as 64GiB")
    parser.add_argument(
        "--platform",
        choices=sorted(GRANULE_BYTES),
        default="cpu",
        help="whose transports the units must suit (default cpu)",
    )
    parser.add_argument("--tokens-per-block", type=integer, metavar="N", help="for a model's config.json only")
    parser.add_argument("--tp", type=integer, metavar="N", help="for a model's config.json only")
    parser.add_argument("--dtype", metavar="D", help="for a model's config.json only")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan and returns 0.

    Raises:
        ValueError: bad input, see the parts.
    """
    layout = read_layout(args)
    for option in _CONFIG_OPTIONS:
        if getattr(args, option[2:].replace("-", "_")) is not None:
            raise ValueError(f"{option} is for a model's config.json, and {args.geometry!r} is a geometry file")
    document = describe(chunking(args, layout), GRANULE_BYTES[args.platform], args.host_bytes)
    for warning in warnings(document):
        print(f"kvjax plan: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(document))
    else:
        from kvjax.cli import render

        render.print_plan(document)
    return 0


def describe(cut: Chunking, granule_bytes: int, host_bytes: int | None) -> dict[str, Any]:
    """Returns the plan as the JSON document that the command prints.

    Args:
        cut: the chunks.
        granule_bytes: what the transports align to.
        host_bytes: the host's budget, or `None`.

    Raises:
        ValueError: `granule_bytes` or `host_bytes` is out of range.
    """
    units = cut_into_units(cut, unit_bytes(cut, granule_bytes))
    host = None
    if host_bytes is not None:
        host = {"budget_bytes": host_bytes, "tokens": tokens_that_fit(cut, units, host_bytes)}
    return {
        "tokens_per_hash": cut.tokens_per_hash,
        "unit_bytes": units.unit_bytes,
        "groups": [_group(cut, units, g) for g in range(len(cut.layout.groups))],
        "bytes_per_token_growing": _bytes_per_token_growing(cut),
        "host": host,
    }


def warnings(document: dict[str, Any]) -> list[str]:
    """Returns what is legal in a plan but likely not meant, one sentence each."""
    return [
        f"group {group['name']!r}: a chunk of {group['tokens_per_chunk']} tokens is longer than the "
        f"{group.get('window_tokens') or group.get('chunk_tokens')} tokens that are read; an engine that frees blocks "
        f"as they leave the window never completes one"
        for group in document["groups"]
        if group["longer_than_window"]
    ]


def _group(cut: Chunking, units: Units, g: int) -> dict[str, Any]:
    group = cut.layout.groups[g]
    blocks, tokens = cut.blocks_per_chunk[g], cut.tokens_per_chunk[g]
    return {
        "name": group.name,
        **kind_fields(group.kind),
        "num_layers": group.num_layers,
        "tokens_per_block": group.tokens_per_block,
        "block_bytes": group.block_bytes,
        "lookahead_tokens": group.lookahead_tokens,
        "blocks_per_chunk": blocks,
        "tokens_per_chunk": tokens,
        "hashes_per_chunk": cut.hashes_per_chunk[g],
        "chunk_bytes": cut.chunk_bytes[g],
        "units_per_chunk": units.units_per_chunk[g],
        "padding_bytes": units.padding_bytes[g],
        "longer_than_window": (
            None if blocks is None or tokens is None else longer_than_window(group.kind, blocks, tokens)
        ),
    }


def _bytes_per_token_growing(cut: Chunking) -> int | float:
    """Bytes that every further token adds: the full groups' blocks, per token."""
    growing = sum(
        Fraction(group.block_bytes, group.tokens_per_block)
        for group in cut.layout.groups
        if isinstance(group.kind, FullAttention)
    )
    return int(growing) if growing == int(growing) else float(growing)

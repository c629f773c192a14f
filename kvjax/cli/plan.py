"""`kvjax plan`: how a cache is cut into chunks and units, what a sequence costs, and how much a host budget holds."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from kvjax.accounting import bytes_per_token_growing
from kvjax.chunking import Chunking, longer_than_window
from kvjax.cli import plan_plot
from kvjax.cli.hit_plot import check_target
from kvjax.cli.model_options import add_model, describe_model, ranks_of_host, read_cache
from kvjax.cli.options import add_chunking, add_json, chunking, integer, size
from kvjax.cli.plan_costs import Choice, Costs, checkpoint_choice, checkpoint_list, number, words
from kvjax.geometry import kind_fields
from kvjax.models import ModelCache
from kvjax.packing import GRANULE_BYTES, Units, cut_into_units, unit_bytes


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "plan", help="chunks, units and capacity of a cache", description=__doc__, allow_abbrev=False
    )
    add_chunking(parser)
    parser.add_argument("--host-bytes", type=size, metavar="S", help="host memory to plan for, such as 64GiB")
    parser.add_argument(
        "--checkpoint-tokens",
        type=checkpoint_choice,
        metavar="N|auto|dense|end",
        help="store windows and states every N tokens, at every chunk, or at a request's end only (default auto)",
    )
    parser.add_argument(
        "--checkpoints",
        type=checkpoint_list,
        metavar="P,P,...",
        help="store windows and states at these tokens of the request and at its end",
    )
    parser.add_argument("--request-tokens", type=integer, metavar="L", help="count requests of this length")
    parser.add_argument(
        "--ranks-per-host",
        type=integer,
        metavar="N",
        help="ranks whose caches the host memory holds (default 1, of a config all of --tp)",
    )
    parser.add_argument(
        "--platform",
        choices=sorted(GRANULE_BYTES),
        default="cpu",
        help="whose transports the units must suit (default cpu)",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw host bytes over tokens to a .png, .svg or .pdf file (needs matplotlib, the extra `plot`)",
    )
    add_model(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan, draws it where that is asked for, and returns 0.

    Raises:
        ValueError: bad input, see the parts.
    """
    if args.plot is not None:
        check_target(args.plot)
    layout, cache = read_cache(args)
    return show(args, chunking(args, layout), cache)


def show(args: argparse.Namespace, cut: Chunking, cache: ModelCache | None = None) -> int:
    """Prints the plan of a chunking as the options say, draws it where that is asked for, and returns 0.

    Args:
        args: the options of this command.
        cut: the groups, as one rank has them, and their chunks.
        cache: what is known of the model, where the groups come from its config.

    Raises:
        ValueError: an option is out of range, or the picture cannot be written.
    """
    units = cut_into_units(cut, unit_bytes(cut, GRANULE_BYTES[args.platform]))
    ranks, distinct = ranks_of_host(args.ranks_per_host, cache)
    costs = Costs(
        cut,
        units,
        ranks=ranks,
        distinct=distinct,
        checkpoints=_checkpoints(args),
        request_tokens=args.request_tokens,
    )
    document = _document(cut, units, costs, args.host_bytes)
    if cache is not None:
        document["model"] = describe_model(cache)
    if args.plot is not None:
        plan_plot.draw(costs, args.plot)
    for warning in [*warnings(document), *costs.warnings]:
        print(f"kvjax plan: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(document))
    else:
        from kvjax.cli import render

        render.print_plan(document, words(costs.chosen))
    return 0


def describe(
    cut: Chunking,
    granule_bytes: int,
    host_bytes: int | None,
    *,
    ranks: int = 1,
    distinct: Mapping[str, int] | None = None,
    checkpoints: Choice = "auto",
    request_tokens: int | None = None,
) -> dict[str, Any]:
    """Returns the plan as the JSON document that the command prints.

    Args:
        cut: the groups, as one rank has them, and their chunks.
        granule_bytes: what the transports align to.
        host_bytes: the host's budget over all ranks, or `None`.
        ranks: ranks that share the host's memory.
        distinct: by group, how many of them differ in content; all by default.
        checkpoints: tokens between checkpoints, `"auto"`, `"dense"`, `"end"`, or the positions of a request.
        request_tokens: length of the requests to count, or `None`.

    Raises:
        ValueError: an argument is out of range.
    """
    units = cut_into_units(cut, unit_bytes(cut, granule_bytes))
    costs = Costs(cut, units, ranks=ranks, distinct=distinct, checkpoints=checkpoints, request_tokens=request_tokens)
    return _document(cut, units, costs, host_bytes)


def warnings(document: dict[str, Any]) -> list[str]:
    """Returns what is legal in a plan but likely not meant, one sentence each."""
    straddling = [
        f"group {group['name']!r}: chunks of {group['tokens_per_chunk']} tokens do not divide the attention chunk of "
        f"{group['chunk_tokens']}: a request that resumes where one starts never stores the chunk that straddles it"
        for group in document["groups"]
        if group["kind"] == "chunked" and group["chunk_tokens"] % group["tokens_per_chunk"]
    ]
    return straddling + [
        f"group {group['name']!r}: a chunk of {group['tokens_per_chunk']} tokens is longer than the "
        f"{group.get('window_tokens') or group.get('chunk_tokens')} tokens that are read; an engine that frees blocks "
        f"as they leave the window never completes one"
        for group in document["groups"]
        if group["longer_than_window"]
    ]


def _checkpoints(args: argparse.Namespace) -> Choice:
    if args.checkpoints is None:
        return "auto" if args.checkpoint_tokens is None else args.checkpoint_tokens
    if args.checkpoint_tokens is not None:
        raise ValueError("only one of --checkpoint-tokens and --checkpoints may be given")
    if args.request_tokens is None:
        raise ValueError("--checkpoints are positions of a request: give its length with --request-tokens")
    return args.checkpoints


def _document(cut: Chunking, units: Units, costs: Costs, host_bytes: int | None) -> dict[str, Any]:
    return {
        "tokens_per_hash": cut.tokens_per_hash,
        "unit_bytes": units.unit_bytes,
        "groups": [_group(cut, units, g) | costs.group(g) for g in range(len(cut.layout.groups))],
        "bytes_per_token_growing": number(bytes_per_token_growing(cut.layout)),
        "host": None if host_bytes is None else costs.host(host_bytes),
        "host_by_checkpoints": None if host_bytes is None else costs.host_by_checkpoints(host_bytes),
        **costs.sums(),
    }


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

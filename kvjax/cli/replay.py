"""`kvjax replay`: what a recorded trace would have hit with other budgets, policies and geometries.

With `--json`, the document is

    {"trace": {"requests", "calls", "tokens_per_hash", "created_by", "cut_off"}, "tokens_per_hash", "unit_bytes",
     "runs": [{"policy", "host_bytes", "hit_rate", "requests", "lookup_tokens", "hit_tokens", "device_tokens",
               "bytes_stored", "bytes_loaded", "bytes_evicted", "refused_stores", "chunks_dropped",
               "peak_bytes_held", "mean_bytes_held",
               "groups": [{"name", "chunks_stored", "bytes_stored", "chunks_loaded", "bytes_loaded", "chunks_evicted",
                           "bytes_evicted", "peak_bytes_held", "mean_bytes_held"} …]} …]}

with one run for each policy and budget. `hit_rate` is `hit_tokens / lookup_tokens`, each request counted once.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from kvjax.chunking import Chunking, resolve_chunking
from kvjax.cli import replay_plot
from kvjax.cli.hit_plot import check_target
from kvjax.cli.model_options import add_model, read_cache
from kvjax.cli.options import add_chunking, add_json, chunking, integer, size
from kvjax.geometry import layout_from_geometry
from kvjax.observe.calls import Trace
from kvjax.observe.replay import replay
from kvjax.observe.replay_figures import ReplayFigures
from kvjax.observe.trace import read_trace
from kvjax.packing import GRANULE_BYTES, Units, cut_into_units, unit_bytes
from kvjax.pool import POLICIES

_MOST_RUNS = 256


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "replay",
        help="hit rates of a recorded trace with other budgets and policies",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="TRACE", help="a trace, as an offloader or `kvjax workload` writes it")
    add_chunking(parser, geometry_optional=True)
    parser.add_argument(
        "--host-bytes", type=_sizes, required=True, metavar="S[,S...]", help="budgets of the host pool, such as 8GiB"
    )
    parser.add_argument(
        "--policy",
        type=_policies,
        default=("lru",),
        metavar="P[,P...]",
        help=f"orders of eviction, of {', '.join(POLICIES)} (default lru)",
    )
    parser.add_argument(
        "--checkpoint-tokens",
        type=_checkpoint_tokens,
        default="auto",
        metavar="N|auto|end",
        help="a checkpoint every N tokens, or at the ends of prompts and requests only (default auto)",
    )
    parser.add_argument(
        "--resume-multiple", type=integer, default=1, metavar="M", help="resume at a multiple of this (default 1)"
    )
    parser.add_argument(
        "--store-after",
        type=integer,
        default=1,
        metavar="N",
        help="store only what prompts asked for N times (default 1)",
    )
    parser.add_argument(
        "--platform",
        choices=sorted(GRANULE_BYTES),
        default="cpu",
        help="whose transports the units must suit (default cpu)",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw hit rates to a .png, .svg or .pdf file (needs matplotlib, extra `plot`)"
    )
    add_model(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replays the trace once for each policy and budget, prints and draws what came of it, and returns 0.

    Raises:
        ValueError: bad input, see the parts.
    """
    from kvjax.observe.progress import progress_bar

    if args.plot is not None:
        check_target(args.plot)
    if len(args.policy) * len(args.host_bytes) > _MOST_RUNS:
        raise ValueError(f"--policy and --host-bytes must ask for at most {_MOST_RUNS} runs, got more")
    trace = read_trace(args.trace)
    cut = _chunking(args, trace)
    units = cut_into_units(cut, unit_bytes(cut, GRANULE_BYTES[args.platform]))
    choices = [(policy, budget) for policy in args.policy for budget in args.host_bytes]
    runs: list[dict[str, Any]] = []
    with progress_bar("replaying", max(1, len(choices) * len(trace.calls))) as advance:
        for policy, budget in choices:
            try:
                figures = replay(
                    trace,
                    cut,
                    units,
                    host_bytes=budget,
                    policy=POLICIES[policy](),
                    checkpoint_tokens=args.checkpoint_tokens,
                    resume_multiple=args.resume_multiple,
                    store_after=args.store_after,
                    on_call=lambda: advance(1),
                )
            except MemoryError:
                raise ValueError(
                    f"--host-bytes must be a pool whose books fit into memory, got {budget} bytes in units "
                    f"of {units.unit_bytes}"
                ) from None
            runs.append(describe_run(policy, budget, figures))
    document = describe(trace, cut, units, runs)
    if args.plot is not None:
        replay_plot.draw(runs, args.plot)
    if trace.cut_off:
        print("kvjax replay: warning: the last line of the trace was cut off, and is left out", file=sys.stderr)
    if args.json:
        print(json.dumps(document))
    else:
        from kvjax.cli import render_replay

        render_replay.print_replay(document)
    return 0


def describe(trace: Trace, cut: Chunking, units: Units, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the JSON document that the command prints."""
    return {
        "trace": {
            "requests": runs[0]["requests"],
            "calls": len(trace.calls),
            "tokens_per_hash": trace.tokens_per_hash,
            "created_by": trace.created_by,
            "cut_off": trace.cut_off,
        },
        "tokens_per_hash": cut.tokens_per_hash,
        "unit_bytes": units.unit_bytes,
        "runs": runs,
    }


def describe_run(policy: str, host_bytes: int, figures: ReplayFigures) -> dict[str, Any]:
    """Returns one run as its JSON object."""
    sums = {
        "hit_rate": figures.hit_rate,
        "bytes_stored": figures.bytes_stored,
        "bytes_loaded": figures.bytes_loaded,
        "bytes_evicted": figures.bytes_evicted,
    }
    return {"policy": policy, "host_bytes": host_bytes} | sums | asdict(figures)


def _chunking(args: argparse.Namespace, trace: Trace) -> Chunking:
    """The chunks of the geometry that is given, or else of the one that was recorded."""
    if args.geometry is not None:
        return chunking(args, read_cache(args)[0])
    if trace.geometry is None:
        raise ValueError(f"GEOMETRY must be given, as {args.trace!r} has none")
    try:
        layout = layout_from_geometry(trace.geometry)
        if args.blocks_per_chunk is None and args.block_size is None:
            return resolve_chunking(layout, blocks_per_chunk=trace.blocks_per_chunk)
    except ValueError as error:
        raise ValueError(f"{args.trace!r}, line 1: {error}") from error
    return chunking(args, layout)


def _listed(text: str, one: Callable[[str], Any]) -> tuple[Any, ...]:
    values = tuple(one(part) for part in text.split(","))
    for value in values:
        if values.count(value) > 1:
            raise argparse.ArgumentTypeError(f"must name each value once, got {value!r} twice")
    return values


def _sizes(text: str) -> tuple[int, ...]:
    return _listed(text, size)


def _policies(text: str) -> tuple[str, ...]:
    def policy(name: str) -> str:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"a policy must be one of {', '.join(POLICIES)}, got {name!r}")
        return name

    return _listed(text, policy)


def _checkpoint_tokens(text: str) -> int | Literal["auto"] | None:
    if text == "auto":
        return "auto"
    return None if text == "end" else integer(text)

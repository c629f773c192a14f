"""`kvjax bench`: how long kvjax takes on this machine. Every benchmark is a module with `add_parser` and `measure`."""

import argparse
import json
from typing import Any

from kvjax.cli import bench_hit, bench_miss, bench_moves, bench_pool, bench_tiers
from kvjax.cli.options import add_json

_BENCHES = (bench_hit, bench_moves, bench_miss, bench_pool, bench_tiers)


def add_parser(commands: Any) -> None:
    """Adds the command and its benchmarks."""
    parser = commands.add_parser("bench", help="how long it takes on this machine", allow_abbrev=False)
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for bench in _BENCHES:
        own = bench.add_parser(benches)
        add_json(own)
        own.set_defaults(run=run, measure=bench.measure)


def run(args: argparse.Namespace) -> int:
    """Prints what the benchmark measured and returns 0.

    Raises:
        ValueError: bad input, see the benchmark.
    """
    document = args.measure(args)
    if args.json:
        print(json.dumps(document))
    else:
        from kvjax.cli import render_bench

        render_bench.print_bench(document)
    return 0

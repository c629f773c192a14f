"""`kvjax bench miss`: decode steps with the offloader on and never a hit, against steps without it."""

import argparse
import os
import platform
from typing import Any

from kvjax._checks import integer
from kvjax.cli.options import integer as integer_text

_DESCRIPTION = """\
Times decode steps of one sequence, a Gemma-style model of Gemma-3-270m's geometry in plain JAX. Three kinds of step
take turns in one process, on the same caches; every figure is a median, "percent" is of a step without the offloader.

off    the step is dispatched, then its token is waited for.
on     the step is dispatched, then `extend`, `store` and `poll` are called while it runs, as an engine does between
       checkpoints, with nothing to store; then its token is waited for. "calls" is the time inside the three.
store  `store` begins to store a prefix of --store-tokens tokens, then a step runs beside it, as in "off". The time
       includes the call of `store`.

A request whose prompt of --prompt-tokens tokens is not known is looked up as often: "lookup"."""


def add_parser(benches: Any) -> argparse.ArgumentParser:
    """Adds the benchmark and returns its parser."""
    parser = benches.add_parser(
        "miss",
        help="what the offloader costs a decode step that it does not help",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, default, what in (
        ("--steps", 200, "steps of each kind"),
        ("--layers", 18, "layers; every sixth is a full one"),
        ("--width", 640, "elements of a hidden state"),
        ("--prompt-tokens", 1024, "tokens before the first step"),
        ("--store-tokens", 16, "tokens whose chunks a store under way moves"),
    ):
        parser.add_argument(name, type=integer_text, default=default, metavar="N", help=f"{what} (default {default})")
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures as the JSON document that the command prints: times in milliseconds.

    Raises:
        ValueError: an option that is out of range.
    """
    num_layers = integer(args.layers, "--layers", at_least=6, below=1000)
    width = integer(args.width, "--width", at_least=5, below=2**16)
    steps = integer(args.steps, "--steps", at_least=1, below=2**20)
    prompt_tokens = integer(args.prompt_tokens, "--prompt-tokens", at_least=1, below=2**20)
    store_tokens = integer(args.store_tokens, "--store-tokens", at_least=16)
    if store_tokens > prompt_tokens:
        raise ValueError(f"`--store-tokens` must be at most `--prompt-tokens`, {prompt_tokens}, got {store_tokens}")
    from kvjax.cli.bench_miss_run import figures

    found = figures(num_layers, width, steps=steps, prompt_tokens=prompt_tokens, store_tokens=store_tokens)
    return {
        "bench": "miss",
        "steps": steps,
        **found,
        "layers": num_layers,
        "width": width,
        "prompt_tokens": prompt_tokens,
        "store_tokens": store_tokens,
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
    }

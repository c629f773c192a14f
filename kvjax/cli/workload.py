"""`kvjax workload`: writes a synthetic trace for `kvjax replay`, the same for the same options."""

import argparse
import json
from dataclasses import fields
from typing import Any

from kvjax._files import replacing
from kvjax.cli.options import add_json, integer, real
from kvjax.observe.calls import LookupCall
from kvjax.observe.trace import first_line, line_of
from kvjax.observe.workloads import KINDS, Workload, workload_calls

_HELP = {
    "requests": "how many requests",
    "seed": "of everything drawn",
    "tokens_per_hash": "tokens that a prefix hash covers",
    "in_flight": "requests served at a time",
    "conversations": "conversations that go on at a time",
    "turn_tokens": "mean tokens of a turn, a tail or a question",
    "reply_tokens": "mean tokens of a reply",
    "most_tokens": "the longest conversation",
    "systems": "system prompts",
    "system_tokens": "tokens of a system prompt",
    "documents": "documents that are asked for again",
    "document_tokens": "tokens of a document",
    "scan_share": "share of a scan's requests whose documents are never seen again",
    "zipf": "exponent of popularity",
}


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("workload", help="write a synthetic trace", description=__doc__, allow_abbrev=False)
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=f"one of {', '.join(KINDS)}")
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="the trace to write; one that exists is replaced at the end"
    )
    for field in fields(Workload):
        if field.name in _HELP:
            parser.add_argument(
                _option(field.name),
                type=real if isinstance(field.default, float) else integer,
                default=field.default,
                metavar="X" if isinstance(field.default, float) else "N",
                help=f"{_HELP[field.name]} (default {field.default})",
            )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the trace, prints what is in it, and returns 0. With `--json` that is
    `{"requests", "calls", "lookup_tokens", "bytes"}`.

    Raises:
        ValueError: a value out of range, or a file that cannot be written.
    """
    from kvjax.observe.progress import progress_bar

    given = vars(args)
    try:
        workload = Workload(args.kind, **{name: given[name] for name in _HELP})
    except ValueError as error:
        raise ValueError(_with_options(str(error))) from error
    calls = tokens = num_bytes = 0
    try:
        with replacing(args.out) as file, progress_bar("writing", workload.requests) as advance:
            num_bytes += file.write(first_line(workload.tokens_per_hash))
            for call in workload_calls(workload):
                num_bytes += file.write(line_of(call))
                calls += 1
                if isinstance(call, LookupCall):
                    tokens += call.num_tokens
                    advance(1)
    except ValueError as error:
        raise ValueError(f"argument --out: {error}") from error
    document = {
        "requests": workload.requests,
        "calls": calls,
        "lookup_tokens": tokens,
        "bytes": num_bytes,
    }
    if args.json:
        print(json.dumps(document))
    else:
        from kvjax.cli.render import human_bytes

        print(
            f"{workload.requests:,} requests of {tokens:,} tokens in {calls:,} calls, {human_bytes(document['bytes'])}"
        )
    return 0


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _with_options(text: str) -> str:
    """An error's text with the name that the command line has for the argument."""
    for name in _HELP:
        if text.startswith(f"`{name}`"):
            return f"`{_option(name)}`" + text[len(name) + 2 :]
    return text

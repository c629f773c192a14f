"""`kvjax hit`: the longest prefix that the given chunks can restore, and what must be loaded for it."""

import argparse
import json
import reprlib
from collections.abc import Mapping
from typing import Any

from kvjax.cli.files import read_json
from kvjax.cli.options import add_chunking, add_json, chunking, integer, read_layout
from kvjax.coverage import Hit, longest_hit
from kvjax.geometry import type_name


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "hit", help="the longest prefix that given chunks restore", description=__doc__, allow_abbrev=False
    )
    add_chunking(parser)
    parser.add_argument("--num-tokens", type=integer, required=True, metavar="N", help="tokens of the request")
    parser.add_argument(
        "--present",
        required=True,
        metavar="FILE",
        help="the chunks on the host, as JSON: {group name: [chunk_idx, ...]}",
    )
    parser.add_argument(
        "--device-tokens", type=integer, default=0, metavar="D", help="prefix that the device holds (default 0)"
    )
    parser.add_argument(
        "--resume-multiple", type=integer, default=1, metavar="M", help="resume at a multiple of this (default 1)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the hit and returns 0.

    Raises:
        ValueError: bad input, see the parts.
    """
    cut = chunking(args, read_layout(args))
    present = read_present(args.present)
    hit = longest_hit(
        cut,
        args.num_tokens,
        present,
        device_tokens=args.device_tokens,
        resume_multiple=args.resume_multiple,
    )
    document = describe(hit)
    if args.json:
        print(json.dumps(document))
    else:
        from kvjax.cli import render

        render.print_hit(document, args.num_tokens)
    return 0


def read_present(path: str) -> dict[str, list[int]]:
    """Returns the chunks that a file names, by group.

    Raises:
        ValueError: the file cannot be read, or is no object of lists of ints.
    """
    document = read_json(path)
    if not isinstance(document, Mapping):
        raise ValueError(f"{path!r} must hold an object {{group name: [chunk_idx …]}}, got {type_name(document)}")
    for name, chunks in document.items():
        if not isinstance(chunks, list):
            raise ValueError(f"{path!r}: group {name!r} must have a list of chunk indices, got {reprlib.repr(chunks)}")
        for chunk_idx in chunks:
            if type(chunk_idx) is not int:
                raise ValueError(
                    f"{path!r}: group {name!r} must have a list of chunk indices, got {reprlib.repr(chunk_idx)} in it"
                )
    return dict(document)


def describe(hit: Hit) -> dict[str, Any]:
    """Returns the hit as the JSON document that the command prints."""
    return {
        "hit_tokens": hit.hit_tokens,
        "load": {name: chunks.tolist() for name, chunks in hit.load.items()},
        "limited_by": list(hit.limited_by),
    }

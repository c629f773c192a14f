"""`kvjax hit`: the longest prefix that the given chunks can restore, and what must be loaded for it.

`--explain` says why it is not longer. With `--json`, the document then has the key `explain`:

    {"next": the smallest larger hit that is possible with every chunk complete at --num-tokens, or null,
     "would_hit": the hit if exactly the missing chunks were there, at least `next`; null where that is,
     "reason": "missing" (chunks are), else why there is no larger hit: "last_token", "resume_multiple",
         "incomplete" (a chunk ends past --num-tokens) or "no_common" (no position suits all groups),
     "sentence": the reason in words,
     "groups": for each group of the layout, in order,
         {"name": …,
          "alone": the hit if every other group had all it needs,
          "restorable": positions [first, last] near the hit: the interval that holds or precedes it, three above,
          "at_hit": what the group needs at the hit, and "at_next": the same at `next`, or null:
              {"position": …,
               "needed_tokens": [start, stop), "required_tokens": [start, stop) with the lookahead,
               "chunks": [[first, last] …] with a required token,
               "device_tokens": [start, stop) of the needed ones that the device holds,
               "load_chunks": [[first, last] …] with a needed token that the device does not hold},
          "missing_chunks": [[first, last] …] and "missing_tokens": [[start, stop) …] for `next`}}

Ranges of chunks and positions include their last, ranges of tokens exclude their stop; the token of a recurrent
group is the last that its state covers. A scratch group has null for `alone` and the two needs, and empty lists.
"""

import argparse
import json
import reprlib
from collections.abc import Mapping
from typing import Any

from kvjax._files import read_json
from kvjax.cli import hit_plot
from kvjax.cli.hit_text import describe_explanation, print_explanation
from kvjax.cli.model_options import add_model, read_cache
from kvjax.cli.options import add_chunking, add_json, chunking, integer
from kvjax.coverage import Hit, longest_hit
from kvjax.explain import explain_hit
from kvjax.geometry import type_name


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "hit",
        help="the longest prefix that given chunks restore",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
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
    parser.add_argument("--explain", action="store_true", help="say why the hit is not longer, and what is missing")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw it to a .png, .svg or .pdf file (needs matplotlib, the extra `plot`)"
    )
    add_model(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the hit, draws it where that is asked for, and returns 0.

    Raises:
        ValueError: bad input, see the parts.
    """
    if args.plot is not None:
        hit_plot.check_target(args.plot)
    cut = chunking(args, read_cache(args)[0])
    present = read_present(args.present)
    options: Any = {"device_tokens": args.device_tokens, "resume_multiple": args.resume_multiple}
    explanation = None
    if args.explain or args.plot is not None:
        explanation = explain_hit(cut, args.num_tokens, present, **options)
        hit = explanation.hit
    else:
        hit = longest_hit(cut, args.num_tokens, present, **options)
    if explanation and args.plot is not None:
        hit_plot.draw(explanation, cut, present, args.device_tokens, args.plot)
    document = describe(hit)
    explained = explanation if args.explain else None
    if args.json:
        print(json.dumps(document | ({"explain": describe_explanation(explained)} if explained else {})))
    else:
        from kvjax.cli import render

        render.print_hit(document, args.num_tokens)
        if explained:
            print_explanation(explained, cut.layout)
    return 0


def read_present(path: str) -> dict[str, list[int]]:
    """Returns the chunks that a file names, by group.

    Raises:
        ValueError: the file cannot be read, or is no object of lists of ints.
    """
    if not path:
        raise ValueError("--present must be the path of a file, got ''")
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

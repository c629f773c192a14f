"""`kvjax tier inspect`: what entries say of themselves."""

import argparse
import itertools
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from kvjax._checks import integer
from kvjax.cli.options import integer as integer_text
from kvjax.cli.options import size
from kvjax.cli.tier_open import add_namespace, add_url, opened
from kvjax.cli.tier_read import DEFAULT_MOST_BYTES, Checked, check_headers, check_whole
from kvjax.tiers import frame
from kvjax.tiers.entries import ROOT, EntryName, parse_name
from kvjax.tiers.tier import Tier

_PIECE_BYTES = 2**20
_PARTS = 5  # of a path, that make the name of an entry
_DESCRIPTION = """\
Lists entries and what their headers say: the group, the place of the chunk in its sequence, the tokens it covers. With
a NAME, as the list shows it, it tells of that entry alone; so it does of a FILE of one entry, which needs no tier.

With --verify the bytes are read as well and their checksum is compared. The exit code is 1 if any entry shown is not
what its name says, or could not be read."""


def add_parser(actions: Any) -> argparse.ArgumentParser:
    """Adds the action and returns its parser."""
    parser = actions.add_parser(
        "inspect",
        help="what entries say of themselves",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_url(parser)
    parser.add_argument("name", nargs="?", metavar="NAME", help="of one entry; or give a FILE of one instead of a URL")
    parser.add_argument("--verify", action="store_true", help="read the bytes, too, and compare their checksums")
    add_namespace(parser)
    parser.add_argument(
        "--limit", type=integer_text, default=100, metavar="N", help="entries shown at most (default 100)"
    )
    parser.add_argument(
        "--max-entry-bytes",
        type=size,
        default=DEFAULT_MOST_BYTES,
        metavar="S",
        help="larger entries are not read whole (default 1GiB)",
    )
    return parser


def describe(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Returns the document, and exit code 0, or 1 if something shown is not as it should be.

    Raises:
        ValueError: bad input, or the tier does not answer.
    """
    limit = integer(args.limit, "--limit", at_least=1)
    if "://" not in args.url:
        if args.name is not None:
            raise ValueError("a NAME is that of an entry in a tier, whose URL must be given before it")
        source, checked = args.url, [_of_file(args.url, verify=args.verify)]
        num_entries = 1
    else:
        with opened(args.url) as tier:
            source = tier.name
            if args.name is None:
                names = tier.list(args.namespace)
                checked = _checked(tier, list(itertools.islice(names, limit)), args)
                num_entries = len(checked) + sum(1 for _ in names)
            else:
                checked = _checked(tier, [_named(args.name)], args)
                num_entries = 1
    if args.name is not None and checked[0].unread == "gone":
        raise ValueError(f"{source} has no entry {args.name}")
    document = {
        "action": "inspect",
        "tier": source,
        "verified": args.verify,
        "num_entries": num_entries,
        "entries": [_row(one, verified=args.verify) for one in checked],
    }
    return document, int(any(one.bad or one.unread for one in checked))


def _named(text: str) -> EntryName:
    name = parse_name(text)
    if name is None:
        raise ValueError(f"NAME must be that of an entry, {ROOT}/NAMESPACE/GROUP-BYTES/XX/HASH, as the list shows it")
    return name


def _checked(tier: Tier, names: list[EntryName], args: argparse.Namespace) -> list[Checked]:
    return list(check_whole(tier, names, args.max_entry_bytes) if args.verify else check_headers(tier, names))


def _of_file(path: str, *, verify: bool) -> Checked:
    """Checks the file of one entry, wherever it lies. Its name is what its path ends with, if that is one, else what
    its header says."""
    given = parse_name("/".join(Path(path).absolute().parts[-_PARTS:]))
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ValueError("URL must be a tier's URL or a file of one entry: what is there is no plain file")
            header = frame.read_header(file.read(frame.HEADER_BYTES))
            name = given or EntryName(header.namespace, header.key, frame.entry_bytes(header.payload_bytes))
            return Checked(name, header, bad=_problem(file, header, name, info.st_size, verify=verify))
    except OSError as error:
        # What is no URL may be a URL with a slip, credentials and all.
        raise ValueError(f"URL must be a tier's URL or a file of one entry: {error.strerror}") from None
    except frame.BadFrameError as error:
        if given is None:
            raise ValueError(f"{path!r} is no entry of this version: its {error.reason} is wrong") from None
        return Checked(given, bad=error.reason)


def _problem(file: FileIO, header: frame.Header, name: EntryName, num_bytes: int, *, verify: bool) -> str | None:
    """Returns why a file, whose header was read, is not what its name says. It takes a piece of memory at a time."""
    if (header.namespace, header.key) != (name.namespace, name.key):
        return "name"
    if not frame.entry_bytes(header.payload_bytes) == name.num_bytes == num_bytes:
        return "length"
    if not verify:
        return None
    state = xxhash.xxh3_128()
    while piece := file.read(_PIECE_BYTES):
        state.update(piece)
    return None if state.digest() == header.checksum else "checksum"


def _row(checked: Checked, *, verified: bool) -> dict[str, Any]:
    name, header = checked.name, checked.header
    problem = checked.bad or checked.unread
    return {
        "name": name.text,
        "namespace": name.namespace.hex(),
        "group_idx": name.group_idx,
        "group": header and header.group_name,
        "chunk_idx": header and header.chunk_idx,
        "tokens": header and list(header.token_span),
        "num_bytes": name.num_bytes,
        "ok": False if checked.bad else None if checked.unread or not verified else True,
        "problem": problem,
    }

"""Options that several commands share, and the text forms of their values."""

import argparse
import re
import reprlib

from kvjax import _checks
from kvjax.chunking import Chunking, resolve_chunking
from kvjax.groups import CacheLayout

_INT = re.compile(r"-?[0-9]+")
_REAL = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_SIZE = re.compile(r"([0-9]+)(B|KiB|MiB|GiB|TiB)?")
_MOST_DIGITS = 30


def size(text: str) -> int:
    """Returns the bytes that a size such as `8GiB` names.

    Raises:
        argparse.ArgumentTypeError: it is not digits with an optional B, KiB, MiB, GiB or TiB.

    >>> size("64KiB")
    65536
    """
    match = _SIZE.fullmatch(text)
    if match:
        _few_digits(match[1], "a size")
    try:
        return _checks.size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def integer(text: str) -> int:
    """Returns the int that `text` spells in decimal digits.

    Raises:
        argparse.ArgumentTypeError: it is anything else.
    """
    if not _INT.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be an int, got {reprlib.repr(text)}")
    _few_digits(text, "an int")
    return int(text)


def real(text: str) -> float:
    """Returns the number that `text` spells in decimal digits.

    Raises:
        argparse.ArgumentTypeError: it is anything else.

    >>> real("0.25")
    0.25
    """
    if not _REAL.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be a number, got {reprlib.repr(text)}")
    _few_digits(text, "a number")
    return float(text)


def blocks_per_chunk(text: str) -> int | dict[str, int] | str:
    """Returns what `--blocks-per-chunk` says: an int, a mapping by group name, or `"auto"`.

    Raises:
        argparse.ArgumentTypeError: it is none of the three, or names a group twice.

    >>> blocks_per_chunk("full=2,local=8")
    {'full': 2, 'local': 8}
    """
    return text if text == "auto" else one_or_by_group(text, "N, name=N,… or auto")


def one_or_by_group(text: str, forms: str) -> int | dict[str, int]:
    """Returns an int, or a mapping by group name.

    Args:
        text: as given.
        forms: what it may be, for messages.

    Raises:
        argparse.ArgumentTypeError: it is neither, or names a group twice.
    """
    if _INT.fullmatch(text):
        return integer(text)
    given: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        if not equals or not name or not _INT.fullmatch(number):
            raise argparse.ArgumentTypeError(f"must be {forms}, got {reprlib.repr(text)}")
        if name in given:
            raise argparse.ArgumentTypeError(f"must name each group once, got {name!r} twice")
        given[name] = integer(number)
    return given


def _few_digits(text: str, what: str) -> None:
    digits = sum(map(str.isdigit, text))
    if digits > _MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"must be {what} of at most {_MOST_DIGITS} digits, got {digits} of them")


def add_chunking(parser: argparse.ArgumentParser, *, geometry_optional: bool = False) -> None:
    """Adds the geometry file and the options that cut its groups into chunks."""
    parser.add_argument(
        "geometry",
        metavar="GEOMETRY",
        nargs="?" if geometry_optional else None,
        help="a geometry file (the cache's groups, as JSON), a model's config.json, or the folder of one",
    )
    parser.add_argument(
        "--blocks-per-chunk",
        type=blocks_per_chunk,
        metavar="N|NAME=N,...|auto",
        help="blocks of a group that move together: one number, one per group, or auto (default 1)",
    )
    parser.add_argument(
        "--block-size",
        type=integer,
        metavar="T",
        help="tokens per chunk, where all groups have the same tokens per block",
    )
    parser.add_argument(
        "--min-chunk-bytes",
        type=size,
        default=65536,
        metavar="S",
        help="the bytes that auto aims for (default 64KiB)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON document on one line")


def chunking(args: argparse.Namespace, layout: CacheLayout) -> Chunking:
    """Returns the chunking that the shared options ask for.

    Raises:
        ValueError: see `kvjax.resolve_chunking`.
    """
    return resolve_chunking(
        layout,
        blocks_per_chunk=args.blocks_per_chunk,
        block_size=args.block_size,
        min_chunk_bytes=args.min_chunk_bytes,
    )

"""`kvjax bench tiers`: how fast tiers write and read, beside plain files, and from which prompt on they pay."""

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvjax._checks import integer
from kvjax.cli.options import integer as integer_text
from kvjax.cli.options import size
from kvjax.cli.render import human_bytes

_CHUNKS = (64 * 2**10, 2**20, 4 * 2**20)
_MOST_CHUNK_BYTES = 2**30
_SPARE_BYTES = 256 * 2**20
_COPIES = 4  # of the bytes, in memory at a time: host pool, cache, frames, buffers
_DESCRIPTION = """\
Writes and reads entries as an offloader does: frame, checksum, up to 32 MiB under way at a time. Beside it, in the same
rounds, plain buffered files of the same bytes are written and read, one for each chunk. Nothing is forced to the disk,
and what is read was just written: files come from the page cache. Figures are the best of the rounds.

"ratio" is the tier's rate over that of plain files, "checksum" the share of the time that is saved if frames are
written and read as they are. "promote" is a prefetch of an Offloader, from the tier to the host pool. "pays from" is
the length of a prompt from which restoring it is faster than computing it on the model of examples/gemma_decode.py, as
examples/restore_or_compute.py measures it; that runs from a checkout only.

Without --tier a temporary folder is measured. Whatever was written is deleted again."""


def add_parser(benches: Any) -> argparse.ArgumentParser:
    """Adds the benchmark and returns its parser."""
    parser = benches.add_parser(
        "tiers",
        help="lower tiers beside plain files, and from which prompt on they pay",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tier", action="append", default=[], metavar="URL", help="a tier to measure; may be repeated")
    parser.add_argument(
        "--chunk-bytes", type=_sizes, default=_CHUNKS, metavar="S,...", help="chunks (default 64KiB,1MiB,4MiB)"
    )
    parser.add_argument(
        "--bytes", type=size, default=64 * 2**20, metavar="S", help="what is moved at a time (default 64MiB)"
    )
    parser.add_argument("--rounds", type=integer_text, default=5, metavar="N", help="rounds (default 5)")
    parser.add_argument("--no-model", action="store_true", help="leave out the prompts of the example's model")
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures as the JSON document that the command prints.

    Raises:
        ValueError: an option out of range, no room, or a tier that cannot be used or fails.
    """
    from kvjax.cli.bench_tiers_moves import move_rows
    from kvjax.cli.bench_tiers_promote import promote_row
    from kvjax.cli.bench_tiers_prompts import pays_from
    from kvjax.memory.host import check_available
    from kvjax.observe.progress import progress_bar
    from kvjax.tiers import TierError

    rounds = integer(args.rounds, "--rounds", at_least=1, below=1000)
    total = integer(args.bytes, "--bytes", at_least=1)
    for chunk_bytes in args.chunk_bytes:
        integer(chunk_bytes, "--chunk-bytes", at_least=1, below=_MOST_CHUNK_BYTES)
        if chunk_bytes % 4:
            raise ValueError(f"`--chunk-bytes` must be multiples of 4, got {chunk_bytes}")
        if chunk_bytes > total:
            raise ValueError(f"`--chunk-bytes` must be at most `--bytes`, {total}, got {chunk_bytes}")
    try:
        check_available(_COPIES * total)
    except MemoryError:
        raise ValueError(f"`--bytes` takes {human_bytes(_COPIES * total)} of memory, more than is available") from None
    rows: list[dict[str, Any]] = []
    promotions: list[dict[str, Any]] = []
    prompts: list[dict[str, Any]] = []
    with _folder(total) as folder:
        urls = args.tier or [f"file://{quote(str(folder))}/tier"]
        steps = len(urls) * (2 * len(args.chunk_bytes) + (not args.no_model))
        with progress_bar("bench tiers", steps) as advance:
            try:
                for url in urls:
                    for chunk_bytes in args.chunk_bytes:
                        num_chunks = total // chunk_bytes
                        rows += move_rows(url, folder / "plain", chunk_bytes, num_chunks, rounds)
                        advance(1)
                        promotions.append(promote_row(url, chunk_bytes, num_chunks, rounds))
                        advance(1)
                    if not args.no_model:
                        prompts.append(pays_from(url, rounds))
                        advance(1)
            except TierError as error:
                raise ValueError(str(error)) from error
    return {
        "bench": "tiers",
        "bytes": total,
        "rounds": rounds,
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "rows": rows,
        "promotions": promotions,
        "prompts": prompts,
    }


@contextmanager
def _folder(total: int) -> Iterator[Path]:
    """A temporary folder with room for plain files and a tier.

    Raises:
        ValueError: there is not so much room.
    """
    above, needed = tempfile.gettempdir(), 2 * total + _SPARE_BYTES
    free = shutil.disk_usage(above).free
    if free < needed:
        raise ValueError(f"{above} must have {human_bytes(needed)} free for `--bytes`, and has {human_bytes(free)}")
    with tempfile.TemporaryDirectory(prefix="kvjax-bench-") as name:
        yield Path(name)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(size(part) for part in text.split(","))

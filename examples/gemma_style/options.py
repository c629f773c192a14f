"""The command line of `gemma_decode.py`."""

import argparse
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .conversations import SHIPPED_TEXT
from .presets import FULL, LOCAL, PRESETS

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
ONE_CHUNK = "chunk"


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for, checked. Named as the options of the command line."""

    preset: str
    layers: int
    width: int
    vocabulary: int
    cache_dtype: str
    rows: int
    conversations: int
    turns: int
    opening_tokens: int
    first_tokens: int
    turn_tokens: int
    new_tokens: int
    device_blocks: int | dict[str, int] | None
    host_bytes: int | str
    blocks_per_chunk: int | dict[str, int] | str
    text: Path
    seed: int
    tiers: tuple[str, ...]
    fused: bool
    json: bool
    plot: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: Sequence[str]) -> Options:
    """Returns the options.

    Raises:
        ValueError: one of them is not valid; the text is a sentence for the user.
        SystemExit: help was asked for.
    """
    given = vars(_parser().parse_args(arguments))
    given["tiers"] = tuple(given.pop("tier"))
    if given["turns"] is None:
        given["turns"] = PRESETS[given["preset"]].turns
    options = Options(**given)
    pattern = PRESETS[options.preset].pattern
    if options.layers < pattern:
        raise ValueError(f"argument --layers: must be at least {pattern}, one full layer, got {options.layers}")
    if options.vocabulary < 256:
        raise ValueError(f"argument --vocabulary: must be at least 256, the bytes, got {options.vocabulary}")
    if options.plot is not None:
        _check_plot(options.plot)
    return options


def size(value: str) -> int:
    """Returns bytes.

    Raises:
        ValueError: not digits with an optional B, KiB, MiB, GiB or TiB.

    >>> size("64MiB")
    67108864
    """
    found = re.fullmatch(r"([0-9]+) ?([A-Za-z]*)", value.strip())
    if not found or found[2].upper() not in _UNITS:
        raise ValueError(f"must be digits with an optional B, KiB, MiB, GiB or TiB, got {value!r}")
    return int(found[1]) * _UNITS[found[2].upper()]


def _check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'kvjax[plot]'")
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise ValueError(f"argument --plot: must end in {', '.join(_PLOT_SUFFIXES)}, got '{path}'")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"argument --plot: cannot write '{path}': its folder must exist, and it must be a file")


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def checked(value: str) -> Any:
        try:
            return read(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _count(at_least: int) -> Callable[[str], int]:
    def count(value: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", value) or not at_least <= int(value) < 2**31:
            raise ValueError(f"must be a whole number from {at_least} to {2**31 - 1}, got {value!r}")
        return int(value)

    return _argument(count)


def _per_group(value: str) -> int | dict[str, int]:
    if re.fullmatch(r"[0-9]+", value) and int(value):
        return int(value)
    counts = {}
    for part in value.split(","):
        found = re.fullmatch(rf"({FULL}|{LOCAL})=([0-9]+)", part.strip())
        if not found or found[1] in counts or not int(found[2]):
            raise ValueError(f"must be a positive whole number, or '{FULL}=N,{LOCAL}=N', got {value!r}")
        counts[found[1]] = int(found[2])
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gemma_decode.py", allow_abbrev=False, description=(
        "Decode conversations with a Gemma-style model in three modes: a device pool without limit, a small one "
        "with offload, and a small one without. The tokens must be the same in all."
    ), formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    add = parser.add_argument
    model = "gemma-3-270m"
    add("--preset", choices=list(PRESETS), default=model, help="geometry per layer")
    add("--layers", type=_count(1), default=6, metavar="N", help="layers; every sixth is a full one")
    add("--width", type=_count(1), default=256, metavar="N", help="width of the model")
    add("--vocabulary", type=_count(1), default=256, metavar="N", help="tokens of the vocabulary")
    add("--cache-dtype", choices=["float32", "bfloat16"], default="float32", help="element type of the caches")
    add("--rows", type=_count(1), default=16, metavar="N", help="tokens in one step")
    add("--conversations", type=_count(1), default=4, metavar="N", help="conversations, served in turn")
    add("--turns", type=_count(1), metavar="N", help="turns of each conversation; by default 6, or 3 for wide presets")
    add("--opening-tokens", type=_count(0), default=96, metavar="N", help="text that all conversations begin with")
    add("--first-tokens", type=_count(1), default=512, metavar="N", help="about so many tokens of text in a first turn")
    add("--turn-tokens", type=_count(1), default=96, metavar="N", help="about so many in each further turn")
    add("--new-tokens", type=_count(1), default=16, metavar="N", help="tokens generated in a turn")
    add("--device-blocks", type=_argument(_per_group), metavar=f"N | {FULL}=N,{LOCAL}=N",
        help="blocks of the small pool; without it, one and a half conversations fit")  # fmt: skip
    add("--host-bytes", type=_argument(lambda v: v if v == ONE_CHUNK else size(v)), default="256MiB", metavar="SIZE",
        help=f"budget in host memory, such as 64MiB, or '{ONE_CHUNK}' for just one of the largest group")  # fmt: skip
    add("--blocks-per-chunk", type=_argument(lambda v: v if v == "auto" else _per_group(v)), default=2,
        metavar=f"auto | N | {FULL}=N,{LOCAL}=N", help="blocks that are stored together")  # fmt: skip
    add("--text", type=Path, default=SHIPPED_TEXT, metavar="FILE", help="text to talk about")
    add("--seed", type=_count(0), default=0, metavar="N", help="of the random weights")
    add("--tier", action="append", default=[], metavar="URL",
        help="a level below host memory, such as file:///var/cache/kvjax, from which conversations are restored after "
        "a restart; may be given again, for one below that")  # fmt: skip
    add("--fused", action="store_true", help="restore and store blocks within the steps, layer by layer")
    add("--json", action="store_true", help="print one line of JSON instead of tables")
    add("--plot", type=Path, metavar="FILE.png", help="draw pool use and time to first token")
    return parser

"""Pictures of measured figures: what the tables of `docs/performance.md` say, and nothing else."""

import re
from pathlib import Path

from .docstrings import one_line
from .svg import AMBER, BLUE, GREY, INK, LIGHT_BLUE, PALE, Axis, Picture

PAGE = Path(__file__).parents[1] / "performance.md"
_UNITS = {"KiB": 2**10, "MiB": 2**20}


def rows_of(heading: str) -> list[list[str]]:
    """Returns the cells of the first table below a heading of the page, its head left out."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    if lines is None:
        raise ValueError(f"`heading` must be one with a table below it, got {heading!r}")
    return [[one_line(cell) for cell in line.strip()[1:-1].split("|")] for line in lines[0].splitlines()[2:]]


def moves() -> str:
    """Returns the picture of stores and loads on the CPU backend, as shares of memcpy, by the length of a row."""
    picture = Picture(860, 330, "Stores and loads beside memcpy")
    table = sorted(rows_of("Moves on the CPU backend"), key=lambda row: (_bytes(row[2]), int(row[1])))
    axis = Axis(250, 480, 1.2)
    for number in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2):
        picture.line(axis.x(number), 20, axis.x(number), 262, stroke=INK if number == 1 else PALE)
        picture.text(axis.x(number), 280, f"{number:.1f}", at="middle", size=12, fill=GREY)
    for place, (block, leaves, row, *ratios) in enumerate(table):
        y = 24 + place * 26
        picture.text(10, y + 14, f"rows of {row}", size=12)
        told = f"{block} blocks, {leaves} {'leaf' if leaves == '1' else 'leaves'}"
        picture.text(240, y + 14, told, at="end", size=11, fill=GREY)
        for ratio, fill, up in zip(map(float, ratios), (BLUE, LIGHT_BLUE, AMBER, PALE), (0, 0, 9, 9), strict=True):
            picture.box(axis.x(ratio) - 4, y + up + 1, 8, 8, fill, edge=INK)
    names = ("float32 store", "float32 load", "bfloat16 store", "bfloat16 load")
    for place, (fill, name) in enumerate(zip((BLUE, LIGHT_BLUE, AMBER, PALE), names, strict=True)):
        picture.box(250 + place * 130, 306, 8, 8, fill, edge=INK)
        picture.text(264 + place * 130, 315, name, size=12)
    picture.text(axis.x(1.2) + 14, 280, "of memcpy's rate", size=12, fill=GREY)
    return picture.svg()


def books() -> str:
    """Returns the picture of what the bookkeeping of a chunk takes, beside vLLM's managers."""
    table = rows_of("The host pool's books")[:7]  # with the smaller pool
    picture = Picture(860, 70 + 44 * len(table), "Bookkeeping beside vLLM's managers")
    most = max(_median(row[2]) for row in table)
    axis = Axis(260, 480, most)
    for place, (_, phase, *cells) in enumerate(table):
        y = 14 + place * 44
        picture.text(10, y + 22, phase, size=12)
        for at, (cell, fill) in enumerate(zip((cells[0], cells[1]), (LIGHT_BLUE, BLUE), strict=True)):
            number = _median(cell)
            picture.box(axis.left, y + at * 17, max(1.0, axis.x(number) - axis.left), 14, fill)
            picture.text(axis.x(number) + 6, y + at * 17 + 12, f"{number:.2f}", size=11)
    y = 30 + 44 * len(table)
    for x, fill, name in ((10, LIGHT_BLUE, "vLLM 0.33, LRU"), (160, BLUE, "kvjax, LRU")):
        picture.box(x, y, 14, 14, fill)
        picture.text(x + 20, y + 12, name, size=12)
    picture.text(300, y + 12, "µs per chunk, median call; 131,072 chunks resident", size=12, fill=GREY)
    return picture.svg()


def _bytes(size: str) -> int:
    number, unit = size.split()
    return int(number) * _UNITS[unit]


def _median(cell: str) -> float:
    found = re.match(r"\**([0-9.]+)", cell)
    if found is None:
        raise ValueError(f"a cell of the table must begin with a figure, got {cell!r}")
    return float(found[1])

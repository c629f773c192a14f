"""Reads the sections of Google-style docstrings."""

import inspect
import re
from collections.abc import Callable

_SECTION = re.compile(r"^(Args|Returns|Raises|Modifies|Requires):$", re.MULTILINE)
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def summary(of: Callable[..., object] | type) -> str:
    """Returns the first paragraph of a docstring, on one line."""
    return one_line((inspect.getdoc(of) or "").partition("\n\n")[0])


def arguments(of: Callable[..., object] | type) -> dict[str, str]:
    """Returns what the `Args` of a docstring say, each on one line, by name."""
    sections = _SECTION.split(inspect.getdoc(of) or "")
    told = dict(zip(sections[1::2], sections[2::2], strict=True)).get("Args", "")
    return {name: one_line(text) for name, text in _ARGUMENT.findall(told)}


def one_line(text: str) -> str:
    """Returns a text with its line breaks and indents made single spaces."""
    return " ".join(text.split())


def cell(text: str) -> str:
    """Returns a text as a cell of a Markdown table."""
    return one_line(text).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)

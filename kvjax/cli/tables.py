"""The plain tables and texts that commands print for people."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 200  # columns where standard output is no terminal, so that nothing is folded


def new_console() -> Console:
    """Returns a console on standard output."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)


def literal(text: str) -> Text:
    """Returns text taken literally, also where standard output cannot spell it."""
    encoding = sys.stdout.encoding or "utf-8"
    return Text(text.encode(encoding, "backslashreplace").decode(encoding))


def plain_table(*left: str, right: Sequence[str] = ()) -> Table:
    """Returns a table without lines, with these headings of left and of right aligned columns."""
    table = Table(*left, box=None, header_style="bold", pad_edge=False)
    for heading in right:
        table.add_column(heading, justify="right")
    return table

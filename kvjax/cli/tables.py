"""The plain tables and texts that commands print for people."""

import re
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 200  # columns where standard output is no terminal, so that nothing is folded


# Blanks at the end of a line, and what tells a terminal about their looks.
_BLANKS = re.compile(r" +((?:\x1b\[[0-9;]*m| )*)$", re.MULTILINE)


class _Console(Console):
    """Prints no blanks at the end of a line; the cells of tables have them."""

    def print(self, *objects: Any, **options: Any) -> None:
        """See `rich.console.Console.print`."""
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write(_BLANKS.sub(lambda blanks: blanks[1].replace(" ", ""), captured.get()))


def new_console(*, wide: int = _WIDE) -> Console:
    """Returns a console on standard output, `wide` columns wide where that is no terminal."""
    return _Console(highlight=False, width=None if sys.stdout.isatty() else wide)


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

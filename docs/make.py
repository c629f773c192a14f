"""Writes what the documentation takes from the code: reference pages and pictures.

python docs/make.py          # writes them
python docs/make.py --check  # exit code 1, and the names of those that are not as the code makes them
"""

import sys
from pathlib import Path

from making import capacity, command_line, configuration, law, performance, transfers

DOCS = Path(__file__).parent
MADE = {
    "reference/cli.md": command_line.page,
    "reference/configuration.md": configuration.page,
    "pictures/books.svg": performance.books,
    "pictures/capacity.svg": capacity.capacity,
    "pictures/groups.svg": law.groups,
    "pictures/law.svg": law.law,
    "pictures/moves.svg": performance.moves,
    "pictures/restorable.svg": law.restorable,
    "pictures/transfers.svg": transfers.three_ways,
}


def outdated() -> list[str]:
    """Returns the files that are not as the code makes them."""
    return [name for name, make in MADE.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != make()]


def main(argv: list[str]) -> int:
    """Writes the files, or checks them."""
    old = outdated()
    if argv == ["--check"]:
        print("\n".join(old))
        return len(old) > 0
    for name in old:
        (DOCS / name).write_text(MADE[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

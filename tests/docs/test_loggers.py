"""The page lists every logger of kvjax, with its levels."""

import ast
import re
from pathlib import Path

from tests.support.pages import ROOT

LOGGERS = ("_LOG", "_log")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def logged(path: Path) -> set[str]:
    """The levels that a module logs at; `log(level, …)` at those that it names as `logging.LEVEL`."""
    levels = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of, name = ast.unparse(node.func.value), node.func.attr
            if of in LOGGERS and name != "log":
                levels.add({"exception": "ERROR"}.get(name, name.upper()))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "logging" and node.attr in LEVELS:
            levels.add(node.attr)
    return levels


def test_the_page_lists_every_logger_with_its_levels():
    found = {}
    for path in sorted((ROOT / "kvjax").rglob("*.py")):
        if "getLogger" in (source := path.read_text(encoding="utf-8")):
            assert re.findall(r"(\w+) = logging\.getLogger\((.*)\)", source) in [
                [(name, "__name__")] for name in LOGGERS
            ]
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = logged(path)
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").split("## Loggers")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\S+)` \| ([A-Z, ]+) \|", page, re.MULTILINE)
    assert {name: set(levels.split(", ")) for name, levels in rows} == found
    assert len(rows) == len(found) > 5

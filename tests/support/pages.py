"""Runs what a page of the documentation shows, in the order of the page, and compares what it prints."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.command import kvjax

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        language: that it names.
        title: the file that it is; empty: none.
        body: what it holds.
        line: of the page where its body starts.
    """

    language: str
    title: str
    body: str
    line: int


def blocks(text: str) -> list[Block]:
    """Returns the fenced blocks of a page."""
    return [Block(m[1], m[2] or "", m[3], text[: m.start(3)].count("\n") + 1) for m in _BLOCK.finditer(text)]


def run_page(name: str, folder: Path, changes: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs a page in a folder, and returns what its Python left.

    Blocks with a title are saved as files. Python is run in one namespace; a `text` block behind it is what it prints,
    the error that ends it included. In `console` blocks the lines after `$` are run, and the others are what they
    print. Of `sh` blocks what calls `kvjax` is run.

    Args:
        name: of the page, below `docs`.
        folder: where it runs.
        changes: texts that stand for others while it is run, such as a folder for another one.
    """
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for old, new in (changes or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    found = blocks(text)
    assert found, name
    for block in found:
        if block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")
    names: dict[str, Any] = {}
    with _within(folder):
        for block, behind in zip(found, [*found[1:], None], strict=True):
            if block.title:
                continue
            where = f"{name}, line {block.line}"
            if block.language == "python":
                printed = _run_python(block, names, name)
                if behind is not None and behind.language == "text":
                    assert printed == behind.body, where
                else:
                    assert not re.search(r"^\w*Error: ", printed, re.MULTILINE), f"{where}: {printed}"
            elif block.language == "console":
                for command, promised in _commands(block.body):
                    assert _run_command(command, folder) == promised, f"{where}: {command}"
            elif block.language == "sh":
                for line in block.body.splitlines():
                    if line.startswith("kvjax "):
                        _run_command(line, folder)
    return names


@contextlib.contextmanager
def _within(folder: Path) -> Iterator[None]:
    """Runs as a session in a folder does: its modules can be imported, and go with it."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if (folder / f"{name}.py").exists():
                del sys.modules[name]


def _run_python(block: Block, names: dict[str, Any], page: str) -> str:
    code = compile("\n" * (block.line - 1) + block.body, page, "exec")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(code, names)
        except ValueError as error:
            print(f"ValueError: {error}")
    return out.getvalue()


def _commands(body: str) -> list[tuple[str, str]]:
    parts = re.split(r"^\$ (.*)\n", body, flags=re.MULTILINE)
    assert not parts[0], parts[0]
    return list(zip(parts[1::2], parts[2::2], strict=True))


def _run_command(line: str, folder: Path) -> str:
    """Runs one command, and returns what it printed."""
    program, *argv = line.split()
    if program == "kvjax":
        ran = kvjax(*argv)
        assert ran.code == 0, ran
        out = ran.out
    else:
        assert program == "python", line
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done
        out = done.stdout
    return out

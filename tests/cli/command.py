"""Runs the command line in this process, and writes the files it reads."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.cli.main import main


class Ran(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def kvjax(*argv: Any) -> Ran:
    """Runs `kvjax` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(arg) for arg in argv])
    return Ran(code, out.getvalue(), err.getvalue())


def document(*argv: Any) -> Any:
    """Runs `kvjax` with `--json` and returns the document on its one line."""
    ran = kvjax(*argv, "--json")
    assert ran.code == 0, ran
    assert ran.out.endswith("\n"), ran
    assert ran.out.count("\n") == 1, ran
    return json.loads(ran.out)


def refusal(*argv: Any) -> str:
    """Runs `kvjax` on bad input, once for people and once with `--json`, and returns the one line of the error."""
    ran = kvjax(*argv)
    assert ran == kvjax(*argv, "--json")
    assert (ran.code, ran.out) == (2, ""), ran
    assert ran.err.endswith("\n"), ran
    assert ran.err.count("\n") == 1, ran
    assert "usage" not in ran.err.lower()
    return ran.err.rstrip("\n")


def saved(folder: Path, content: Any, name: str = "geometry.json") -> Path:
    """Writes a file: JSON, or text and bytes as they are."""
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def full(name: str, tokens_per_block: int, block_bytes: int = 64, **more: Any) -> dict[str, Any]:
    """A group of full attention, as a geometry file has it."""
    return {"name": name, "kind": "full", "tokens_per_block": tokens_per_block, "block_bytes": block_bytes} | more


def sliding(name: str, tokens_per_block: int, window_tokens: int, block_bytes: int = 64) -> dict[str, Any]:
    """A group of sliding-window attention, as a geometry file has it."""
    return full(name, tokens_per_block, block_bytes) | {"kind": "sliding", "window_tokens": window_tokens}


DESIGN = {
    "tokens_per_hash": None,
    "groups": [
        full("global", 16, 65536, num_layers=10),
        sliding("local", 16, 1024, 65536) | {"num_layers": 50},
        full("scout", 16, 65536) | {"kind": "chunked", "chunk_tokens": 8192},
        full("state", 528, 2146304) | {"kind": "recurrent"},
        full("ring", 4, 2048) | {"kind": "scratch"},
        full("draft", 16, 4096, lookahead_tokens=16),
    ],
}

"""Measure from which length on restoring a prompt from a tier is faster than computing it.

Prompts of growing length, each of its own part of the text, are computed by the engine of `gemma_decode.py`, and kept
in a tier. Then, in each round, an engine with an empty device cache and an empty host pool serves every prompt twice:
once computing it, once restoring it from the tier. What counts is the time to the first token.

    python examples/restore_or_compute.py --tier file:///var/cache/kvjax
    python examples/restore_or_compute.py --tier redis://127.0.0.1:6379/0 --tokens 64,256,1024 --json

A URL with credentials need not be an argument, which others can see: `--tier -` reads it from standard input. The
chunks are deleted at the end.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from gemma_style.conversations import SHIPPED_TEXT, read_text
from gemma_style.engine import Engine, Turn
from gemma_style.hooks import CacheHook, NoOffload, Offload
from gemma_style.presets import PRESETS, ModelShape
from gemma_style.stepper import Stepper
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvjax

BAD_INPUT = 2
_LAYERS, _WIDTH, _VOCABULARY, _ROWS, _BLOCKS_PER_CHUNK = 6, 256, 256, 16, 2
_HOST_BYTES = 2**28


class Prompts:
    """Prompts of several lengths, and engines to serve them.

    Args:
        lengths: tokens of each prompt.
        url: of the tier.
    """

    def __init__(self, lengths: Sequence[int], url: str):
        text = read_text(SHIPPED_TEXT)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.prompts = [
            tuple(text[(start + i) % len(text)] for i in range(tokens))
            for start, tokens in zip(starts, lengths, strict=True)
        ]
        shape = ModelShape(PRESETS["gemma-3-270m"], _LAYERS, _WIDTH, _VOCABULARY, jnp.dtype("float32"))
        self._layout = shape.layout()
        self._stepper = Stepper(shape, seed=0, rows=_ROWS, max_tokens=max(lengths) + 1)
        tokens_per_block = {name: kind.tokens_per_block for name, kind in self._stepper.attention.items()}
        self._num_blocks = {name: -(-(sum(lengths) + len(lengths)) // n) + 1 for name, n in tokens_per_block.items()}
        self._url = url
        self._model = f"restore or compute {os.urandom(16).hex()}"  # nobody else's chunks hit

    def engine(self, hook: CacheHook | None = None) -> tuple[Engine, CacheHook]:
        """Returns an engine that holds nothing; without `hook`, one that computes everything."""
        engine, hook = Engine(self._stepper, self._num_blocks), hook or NoOffload(self._stepper.attention)
        engine.warm_up(hook)
        return engine, hook

    def offloader(self) -> kvjax.Offloader:
        """Returns an offloader with an empty host pool, and the tier."""
        return kvjax.Offloader(
            self._layout,
            self._stepper.new_caches(self._num_blocks),
            host_bytes=_HOST_BYTES,
            blocks_per_chunk=_BLOCKS_PER_CHUNK,
            model=self._model,
            tiers=[self._url],
        )

    def store(self) -> str:
        """Computes all prompts and keeps them in the tier; returns the tier's name."""
        with self.offloader() as offloader:
            engine, hook = self.engine(Offload(offloader))
            for i, prompt in enumerate(self.prompts):
                engine.turn(f"prompt{i}", prompt, 1, hook)
            offloader.wait()
            offloader.flush()
            return offloader.stats().tiers[0].name

    def serve(self) -> list[tuple[Turn, Turn]]:
        """Serves each prompt twice: computed, and restored."""
        with self.offloader() as offloader:
            computing, plain = self.engine()
            restoring, offload = self.engine(Offload(offloader))
            turns = []
            for i, prompt in enumerate(self.prompts):
                turns.append(
                    tuple(e.turn(f"prompt{i}", prompt, 1, h) for e, h in ((computing, plain), (restoring, offload)))
                )
            offloader.wait()
        return turns

    def delete(self) -> None:
        """Deletes the chunks from the tier."""
        with self.offloader() as offloader:
            offloader.invalidate(offloader.namespace())


def measure(url: str, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Returns the figures. The first round, and the first prompt of each round, are not counted: they warm up.

    Raises:
        ValueError: the tier cannot be used.
        AssertionError: a restored prompt goes on with another token than a computed one.
    """
    prompts = Prompts([lengths[0], *lengths], url)
    try:
        name = prompts.store()
        served = [prompts.serve() for _ in track(range(1 + rounds), "rounds", console=Console(stderr=True))][1:]
    finally:
        prompts.delete()
    rows = []
    for i, tokens in enumerate(lengths, 1):
        computed, restored = zip(*(turns[i] for turns in served), strict=True)
        assert {turn.tokens for turn in computed} == {turn.tokens for turn in restored}, "tokens must be the same"
        rows.append(
            {
                "tokens": tokens,
                "restored_tokens": min(turn.restored_tokens for turn in restored),
                "compute_ms": round(statistics.median(turn.ttft_s for turn in computed) * 1e3, 3),
                "restore_ms": round(statistics.median(turn.ttft_s for turn in restored) * 1e3, 3),
            }
        )
    return {"tier": name, "pays_from_tokens": pays_from(rows), "prompts": rows}


def pays_from(rows: Sequence[dict[str, Any]]) -> int | None:
    """Returns the shortest prompt from which on restoring was faster, whatever the length; `None` if there is none.

    >>> slow, fast = {"restore_ms": 2, "compute_ms": 1}, {"restore_ms": 1, "compute_ms": 2}
    >>> pays_from([{"tokens": 1} | fast, {"tokens": 2} | slow, {"tokens": 3} | fast, {"tokens": 4} | fast])
    3
    """
    first = None
    for row in reversed(rows):
        if row["restore_ms"] >= row["compute_ms"]:
            break
        first = row["tokens"]
    return first


def print_table(document: dict[str, Any], console: Console) -> None:
    """Prints the figures."""
    table = Table(title=f"Time to first token, {document['tier']}")
    for name in ("prompt", "restored", "restore", "compute"):
        table.add_column(name, justify="right")
    for row in document["prompts"]:
        times = (f"{row[name]:.1f} ms" for name in ("restore_ms", "compute_ms"))
        table.add_row(f"{row['tokens']:,}", f"{row['restored_tokens']:,}", *times)
    console.print(table)
    first = document["pays_from_tokens"]
    console.print("Restoring does not pay." if first is None else f"Restoring pays from {first:,} tokens on.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example and returns its exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description="restore prompts from a tier, or compute them")
    parser.add_argument("--tier", required=True, metavar="URL", help="the tier; - reads its URL from standard input")
    parser.add_argument("--tokens", default="32,64,128,256,512,1024,2048", metavar="N,...", help="lengths, ascending")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds, of which the median is taken")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    args = parser.parse_args(arguments)
    try:
        lengths = [int(part) for part in args.tokens.split(",")]
        if lengths != sorted(set(lengths)) or lengths[0] < 1 or args.rounds < 1:
            raise ValueError("--tokens must be positive and ascending, and --rounds positive")
        url = sys.stdin.readline().strip() if args.tier == "-" else args.tier
        document = measure(url, lengths, args.rounds)
    except (ValueError, MemoryError, OSError) as error:
        print(f"restore_or_compute: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    if args.json:
        print(json.dumps(document))
    else:
        print_table(document, Console(width=None if sys.stdout.isatty() else 120))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Decode conversations with a Gemma-style model whose KV cache does not fit the device.

Several conversations of several turns, over a real text, are served on one paged cache with two groups:
full-attention layers and sliding-window layers. The same turns run in three modes: with a device pool that
holds everything, with a small pool whose evicted blocks kvjax keeps in host memory and restores, and with
the small pool alone, where evicted tokens are computed again. The tokens must be the same in all three, and
the logits of the first two bit for bit.

Run it from a checkout, with the extra `examples` installed (`plot` as well for `--plot`):

    python examples/gemma_decode.py
    python examples/gemma_decode.py --preset gemma-4-12B
    python examples/gemma_decode.py --cache-dtype bfloat16 --host-bytes 8MiB --plot run.png
    python examples/gemma_decode.py --host-bytes chunk --json
    python examples/gemma_decode.py --fused
    python examples/gemma_decode.py --tier file:///var/cache/kvjax

With `--fused`, blocks are restored and stored by the steps themselves, layer by layer (`kvjax.fused`), instead of
between them.

With `--tier`, chunks are also kept in levels below host memory, which outlive the process: a second run with the same
options restores its conversations from there, from their first turn on. A run that was killed leaves what it had
written by then. What is damaged is computed again: the tokens are compared as ever.

The weights are random, from `--seed`: the answers mean nothing, but every one of them depends on the whole
cache. The geometry of each layer is the real one of the preset; depth, width and vocabulary are scaled
down (`--layers`, `--width`, `--vocabulary`) so that two CPU cores suffice. Tables go to standard output and
progress to standard error. Exit code 0: all tokens equal; 1: they differ; 2: bad input.
"""

import os
import sys
from collections.abc import Sequence

from gemma_style.engine import Turn
from gemma_style.options import Options, parse
from gemma_style.plot import draw
from gemma_style.report import as_json, print_tables
from gemma_style.run import COMPILING, MODES, Outcome, run
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

TOKENS_DIFFER, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example and returns its exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        outcome = _with_progress(options)
        if options.plot is not None:
            draw(outcome, options.plot)
    except (ValueError, MemoryError, OSError) as error:
        print(f"gemma_decode: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("gemma_decode: interrupted", file=sys.stderr)
        return INTERRUPTED
    if options.json:
        print(as_json(outcome))
    else:
        print_tables(outcome, Console(width=None if sys.stdout.isatty() else 120))
    sys.stdout.flush()
    return 0 if outcome.tokens_identical() else TOKENS_DIFFER


def _with_progress(options: Options) -> Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    turns = options.turns * options.conversations
    tasks = {
        stage: progress.add_task(
            f"{stage}: turns" if stage in MODES else stage, total=1 if stage == COMPILING else turns, start=False
        )
        for stage in (COMPILING, *MODES)
    }

    def on_turn(stage: str, turn: Turn | None) -> None:
        if turn is not None:
            progress.advance(tasks[stage])
            return
        progress.start()  # bad input leaves no bar behind
        if stage != COMPILING:
            progress.update(tasks[COMPILING], completed=1)
        progress.start_task(tasks[stage])

    try:
        return run(options, on_turn)
    finally:
        if progress.live.is_started:
            progress.stop()


if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        sys.stdout.flush()
        os._exit(code)  # JAX may crash when the interpreter ends while it compiles
    sys.exit(code)

"""A batching loop of one's own, with kvjax: admission, preemption and abort over mixed groups.

Requests that share openings are served by one loop (`batching/loop.py`, the pattern to copy): every iteration admits
what fits, runs one step over tokens of many requests, stores, and takes blocks away from the newest request where they
run out. The model has full attention, sliding windows and recurrent states, so that its cache has three groups whose
blocks differ. The same requests are served three times: on a device that holds all of them, on a small one with kvjax,
and on a small one without. In the last two, requests are preempted and aborted on purpose. The tokens must be the same
everywhere; those of an aborted request are the first ones.

Run it from a checkout, with the extra `examples` installed:

    python examples/continuous_batching.py
    python examples/continuous_batching.py --requests 40 --preempt-every 3 --abort-every 5
    python examples/continuous_batching.py --tier file:///var/cache/kvjax --json

The weights are random, from `--seed`. Tables go to standard output and progress to standard error. Exit code 0: all
tokens equal; 1: they differ; 2: bad input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batching.loop import Loop
from batching.model import FULL, LOCAL, STATE, TOKENS_PER_BLOCK, VOCABULARY, new_weights
from batching.sequences import Phase
from batching.sequences import Sequence as Request
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import kvjax

ROOMY, OFFLOADED, ALONE = "roomy device", "small device, kvjax", "small device alone"
TOKENS_DIFFER, BAD_INPUT, INTERRUPTED = 1, 2, 130
TEXT = Path(__file__).parent / "data" / "alice.txt"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One mode.

    Args:
        loop: what served it.
        requests: as it left them.
    """

    loop: Loop
    requests: list[Request]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example and returns its exit code."""
    try:
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        outcomes = _run(options)
    except (ValueError, MemoryError, OSError) as error:
        print(f"continuous_batching: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("continuous_batching: interrupted", file=sys.stderr)
        return INTERRUPTED
    identical = all(_same(outcomes[ROOMY], outcome) for outcome in outcomes.values())
    rows = {mode: _row(outcome) for mode, outcome in outcomes.items()}
    if options.json:
        print(json.dumps({"tokens_identical": identical, "modes": rows}))
    else:
        _print(rows, identical)
    return 0 if identical else TOKENS_DIFFER


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A batching loop with kvjax.", exit_on_error=False)
    for name, default, what in (
        ("--requests", 16, "requests to serve"),
        ("--new-tokens", 24, "tokens to generate for each"),
        ("--seats", 6, "requests at a time"),
        ("--rows", 32, "tokens of one step"),
        ("--device-requests", 3, "the small device holds so many of the longest request"),
        ("--preempt-every", 10, "preempt the newest request every so many iterations; 0 for never"),
        ("--abort-every", 6, "abort every so manieth request; 0 for none"),
        ("--seed", 0, "of the weights"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{what} (default {default})")
    parser.add_argument("--host-bytes", type=int, default=8 * 2**20, help="budget of the host pool (default 8 MiB)")
    parser.add_argument("--tier", action="append", default=[], metavar="URL", help="a level below the host pool")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    try:
        options, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if unknown:
        raise ValueError(f"unknown arguments: {' '.join(unknown)}")
    for name in ("requests", "new_tokens", "seats", "rows", "device_requests"):
        if getattr(options, name) < 1:
            raise ValueError(f"`--{name.replace('_', '-')}` must be at least 1, got {getattr(options, name)}")
    for name in ("preempt_every", "abort_every", "seed"):
        if getattr(options, name) < 0:
            raise ValueError(f"`--{name.replace('_', '-')}` must not be below 0, got {getattr(options, name)}")
    if options.rows < options.seats:
        raise ValueError(f"`--rows` must hold a token of every seat, {options.seats}, got {options.rows}")
    return options


def prompts_of(count: int) -> list[bytes]:
    """Prompts of 60 to 140 tokens; every third one begins as an earlier one did."""
    text = TEXT.read_bytes()
    assert max(text) < VOCABULARY, "a token is a byte"
    prompts: list[bytes] = []
    for n in range(count):
        own = text[97 * n % 3000 :][: 40 + 37 * n % 60]
        opening = prompts[n // 3][:64] if n % 3 == 2 else text[5000 + 11 * n :][:24]
        prompts.append(opening + own)
    return prompts


def _run(options: argparse.Namespace) -> dict[str, Outcome]:
    weights, prompts = new_weights(options.seed), prompts_of(options.requests)
    longest = max(map(len, prompts)) + options.new_tokens
    of_longest = {name: -(-longest // TOKENS_PER_BLOCK[name]) + 1 for name in (FULL, LOCAL)} | {STATE: 1}
    small = {name: blocks * options.device_requests for name, blocks in of_longest.items()}
    roomy = {name: blocks * options.seats for name, blocks in of_longest.items()}

    def offload(layout: kvjax.CacheLayout, caches: Any) -> kvjax.Offloader:
        return kvjax.Offloader(
            layout,
            caches,
            host_bytes=options.host_bytes,
            model=f"continuous_batching, seed {options.seed}",
            checkpoint_tokens=32,
            tiers=options.tier,
        )

    outcomes = {}
    with Progress(console=Console(stderr=True)) as progress:
        for mode, blocks, makes in ((ROOMY, roomy, None), (OFFLOADED, small, offload), (ALONE, small, None)):
            task = progress.add_task(mode, total=len(prompts))
            loop = Loop(weights, blocks, offload=makes, seats=options.seats, rows=options.rows, max_tokens=longest + 1)
            requests = [Request(f"r{n}", list(prompt), options.new_tokens) for n, prompt in enumerate(prompts)]
            try:
                _serve(
                    loop,
                    requests,
                    options,
                    disturbed=mode != ROOMY,
                    on_ended=lambda n, t=task: progress.update(t, completed=n),
                )
            finally:
                if loop.offloader is not None:
                    loop.offloader.close()
            outcomes[mode] = Outcome(loop, requests)
    return outcomes


def _serve(loop: Loop, requests: list[Request], options: argparse.Namespace, *, disturbed: bool, on_ended: Any) -> None:
    for request in requests:
        loop.submit(request)
    while not loop.is_idle:
        loop.iterate()
        iteration = loop.counts.iterations
        if disturbed and options.preempt_every and iteration % options.preempt_every == 0:
            running = [one for one in loop.admitted if one.phase is Phase.RUNNING]
            if len(running) > 1:
                loop.preempt(running[-1])
        for n, request in enumerate(requests):
            late = options.abort_every and n % options.abort_every == options.abort_every - 1
            ended = request.phase in (Phase.DONE, Phase.ABORTED)
            if (
                disturbed
                and late
                and not ended
                and len(request.tokens) > request.prompt_tokens + n % options.new_tokens
            ):
                loop.abort(request)
        loop.blocks.check_integrity(requests)
        on_ended(sum(request.phase in (Phase.DONE, Phase.ABORTED) for request in requests))


def _same(one: Outcome, other: Outcome) -> bool:
    """Whether all tokens are the same; those of aborted requests are the first ones."""
    return all(
        b.tokens == a.tokens if b.phase is Phase.DONE else b.tokens == a.tokens[: len(b.tokens)]
        for a, b in zip(one.requests, other.requests, strict=True)
    )


def _row(outcome: Outcome) -> dict[str, int]:
    requests = outcome.requests
    return {
        "iterations": outcome.loop.counts.iterations,
        "computed_tokens": sum(request.computed_tokens for request in requests),
        "restored_tokens": sum(request.restored_tokens for request in requests),
        "preemptions": outcome.loop.counts.preemptions,
        "aborted": sum(request.phase is Phase.ABORTED for request in requests),
        "failed_loads": outcome.loop.counts.failed_loads,
    }


def _print(rows: dict[str, dict[str, int]], identical: bool) -> None:
    table = Table()
    table.add_column("mode")
    for name in next(iter(rows.values())):
        table.add_column(name.replace("_", " "), justify="right")
    for mode, row in rows.items():
        table.add_row(mode, *(f"{value:,}" for value in row.values()))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print("tokens: the same in all modes" if identical else "tokens: THEY DIFFER")


if __name__ == "__main__":
    sys.exit(main())

"""The loop of `continuous_batching.py` in several processes, each with a part of every head's cache.

This script starts the processes itself, on the loopback interface, under `jax.distributed`; on a cluster each host
runs one of them. All run the same loop. Each keeps the chunks of its own devices, and `kvjax.RankedOffloader` has all
of them decide alike. The same requests are served on a device that holds all of them, and on a small one with kvjax,
preempted on purpose: the tokens must be the same.

Run it from a checkout, with the extra `examples` installed:

    python examples/many_processes.py
    python examples/many_processes.py --processes 4 --json
    python examples/many_processes.py --lose 1

With `--lose`, one of the processes dies in the middle; the others say so and end. Exit code 0: all tokens equal, in all
processes; 1: they differ; 2: bad input; 3: a process was lost; 130: interrupted.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from batching.loop import Loop
from batching.model import FULL, HEADS, LOCAL, STATE, TOKENS_PER_BLOCK, new_weights
from batching.sequences import Phase
from batching.sequences import Sequence as Request
from continuous_batching import prompts_of
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

import kvjax
from kvjax.ranks import RanksError

TOKENS_DIFFER, BAD_INPUT, LOST, INTERRUPTED = 1, 2, 3, 130
NEW_TOKENS, SEATS, ROWS, TIMEOUT_S = 12, 4, 32, 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example and returns its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = _parse(given)
    except ValueError as error:
        print(f"many_processes: error: {error}", file=sys.stderr)
        return BAD_INPUT
    if options.rank is not None:
        return _serve_as(options)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, *given, "--port", str(port)]
    try:
        codes, ended = _run([[*command, "--rank", str(rank)] for rank in range(options.processes)])
    except KeyboardInterrupt:
        print("many_processes: interrupted", file=sys.stderr)
        return INTERRUPTED
    told = [f"process {rank}: {err.splitlines()[-1]}" for rank, (_, err) in enumerate(ended) if codes[rank] == LOST]
    killed = [f"process {rank} was killed by signal {-code}" for rank, code in enumerate(codes) if code < 0]
    if told or killed:
        print(f"many_processes: error: {(told + killed)[0]}", file=sys.stderr)
        return LOST
    if any(codes):
        print("".join(err for _, err in ended), file=sys.stderr)
        return max(codes, key=abs)
    found = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    identical = all(one["tokens"] == found[0]["tokens"] == one["without"] for one in found)
    rows = [{name: one[name] for name in ("restored_tokens", "preemptions", "bytes_loaded")} for one in found]
    if options.json:
        print(json.dumps({"tokens_identical": identical, "processes": rows}))
    else:
        for rank, row in enumerate(rows):
            print(f"process {rank}: " + ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in row.items()))
        print("tokens: the same with and without kvjax, in all processes" if identical else "tokens: THEY DIFFER")
    return 0 if identical else TOKENS_DIFFER


def _run(commands: Sequence[Sequence[str]]) -> tuple[list[int], list[tuple[str, str]]]:
    """Runs processes to their ends, and returns their exit codes, and what each wrote to its two outputs.

    Where one fails, the others have some time to say so, and are then killed; on Ctrl-C all are, at once.
    """
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in commands]
        processes = [
            subprocess.Popen(one, stdout=out, stderr=err) for one, (out, err) in zip(commands, files, strict=True)
        ]
        over = None
        try:
            while any(process.poll() is None for process in processes):
                if over is None and any(process.poll() for process in processes):
                    over = time.monotonic() + 3 * TIMEOUT_S
                if over is not None and time.monotonic() >= over:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for of_process in files:
            for file in of_process:
                file.seek(0)
        return [process.returncode for process in processes], [(out.read(), err.read()) for out, err in files]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A batching loop in several processes.", exit_on_error=False)
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        help=f"how many, a divisor of {HEADS}: the heads are split among them (default 2)",
    )
    parser.add_argument("--requests", type=int, default=8, help="requests to serve (default 8)")
    parser.add_argument("--lose", type=int, metavar="RANK", help="a process that dies in the middle, not 0")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    try:
        options, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if unknown:
        raise ValueError(f"unknown arguments: {' '.join(unknown)}")
    if options.processes < 1 or HEADS % options.processes:
        raise ValueError(f"`--processes` must divide {HEADS}, got {options.processes}")
    if options.requests < 1:
        raise ValueError(f"`--requests` must be at least 1, got {options.requests}")
    if options.lose is not None and not 0 < options.lose < options.processes:
        raise ValueError(f"`--lose` must be from 1 to {options.processes - 1}, got {options.lose}")
    return options


def _serve_as(options: argparse.Namespace) -> int:
    """One process."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{options.port}", options.processes, options.rank)
    mesh = Mesh(np.array(jax.devices()), ("heads",))
    prompts = prompts_of(options.requests)
    longest = max(map(len, prompts)) + NEW_TOKENS
    of_longest = {name: -(-longest // TOKENS_PER_BLOCK[name]) + 1 for name in (FULL, LOCAL)} | {STATE: 1}

    def offload(layout: kvjax.CacheLayout, caches: Any) -> kvjax.RankedOffloader:
        offloader = kvjax.Offloader(layout, caches, host_bytes=4 * 2**20, model="many", checkpoint_tokens=32)
        return kvjax.RankedOffloader(offloader, timeout_s=TIMEOUT_S)

    served = []
    for requests_held, makes in ((SEATS, None), (2, offload)):
        blocks = {name: number * requests_held for name, number in of_longest.items()}
        loop = Loop(new_weights(0), blocks, offload=makes, seats=SEATS, rows=ROWS, max_tokens=longest + 1, mesh=mesh)
        requests = [Request(f"r{n}", list(prompt), NEW_TOKENS) for n, prompt in enumerate(prompts)]
        served.append((loop, requests))
        try:
            _serve(loop, requests, options)
        except (RanksError, JaxRuntimeError) as error:  # whichever comes first: kvjax, or a collective of the step
            if loop.offloader is not None:
                loop.offloader.close()
            print(" ".join(str(error).split()), file=sys.stderr, flush=True)
            os._exit(LOST)  # JAX would wait for the process that is gone
    (_, without), (loop, requests) = served
    with loop.offloader as ranked:
        loaded = ranked.offloader.stats().bytes_loaded
    report = {
        "tokens": [request.tokens for request in requests],
        "without": [request.tokens for request in without],
        "restored_tokens": sum(request.restored_tokens for request in requests),
        "preemptions": loop.counts.preemptions,
        "bytes_loaded": loaded,
    }
    print(json.dumps(report), flush=True)
    jax.distributed.shutdown()
    return 0


def _serve(loop: Loop, requests: list[Request], options: argparse.Namespace) -> None:
    for request in requests:
        loop.submit(request)
    while not loop.is_idle:
        loop.iterate()
        if loop.offloader is None:
            continue
        if loop.counts.iterations == 20 and options.rank == options.lose:
            os._exit(9)
        running = [one for one in loop.admitted if one.phase is Phase.RUNNING]
        if loop.counts.iterations % 5 == 0 and len(running) > 1:
            loop.preempt(running[-1])
        loop.blocks.check_integrity(requests)


if __name__ == "__main__":
    sys.exit(main())

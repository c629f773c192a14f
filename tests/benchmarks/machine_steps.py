"""Runs the stateful machine of the ledger for as many steps as one likes, with new examples each time.

    python -m tests.benchmarks.machine_steps --steps 200000 [--json]

Each step is a call or several of an engine with requests that share prefixes, fail, are cancelled, evicted, preempted
and invalidated; after each the books are recounted and every byte that was moved is compared. It stops at the first
failure.
"""

import argparse
import json
import sys
import time

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvjax.observe.progress import progress_bar
from tests.test_ledger_machine import LedgerMachine

_EXAMPLES_AT_A_TIME = 200
_STEPS_OF_AN_EXAMPLE = 50


def main() -> int:
    """Runs it and prints what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    steps = 0
    examples = 0

    class Counted(LedgerMachine):
        def check_invariants(self, *args, **more):
            nonlocal steps
            steps += 1
            super().check_invariants(*args, **more)

        def teardown(self):
            nonlocal examples
            examples += 1
            super().teardown()

    many = settings(
        max_examples=_EXAMPLES_AT_A_TIME,
        stateful_step_count=_STEPS_OF_AN_EXAMPLE,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    start = time.monotonic()
    with progress_bar("steps", args.steps) as advance:
        while steps < args.steps:
            before = steps
            run_state_machine_as_test(Counted, settings=many)
            advance(steps - before)
    figures = {"steps": steps, "examples": examples, "seconds": round(time.monotonic() - start, 1), "failures": 0}
    print(json.dumps(figures) if args.json else ", ".join(f"{number} {name}" for name, number in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

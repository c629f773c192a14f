"""Child processes that compile, several at a time, each once.

What compiles runs in a process of its own: a compiler that aborts or hangs must not take the tests with it, and
libtpu has to be told by the environment, before it is loaded, that no TPU is there to ask.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_LIMIT_S = 900
_LAST_WORDS = 4000  # characters of a failed child's standard error that are shown


@dataclass(frozen=True, slots=True)
class Child:
    """A run of `python -m module arguments` that prints JSON on its last line.

    Args:
        module: what to run, from the root of the repository.
        arguments: of the command line.
        limit_s: seconds that it may take.
    """

    module: str
    arguments: tuple[str, ...] = ()
    limit_s: float = _LIMIT_S

    @property
    def command(self) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", self.module, *self.arguments]


class Children:
    """Runs children, each once however often it is asked for, and at most as many at a time as there are CPUs.

    Args:
        at_a_time: how many run at a time; `None` is one for each CPU.
    """

    def __init__(self, at_a_time: int | None = None) -> None:
        self._executor = ThreadPoolExecutor(at_a_time or os.cpu_count())
        self._results: dict[Child, Future[Any]] = {}
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def start(self, child: Child) -> None:
        """Lets a child run when those that were started before it leave a place, unless it was started."""
        if child not in self._results:
            self._results[child] = self._executor.submit(self._run, child)

    def result(self, child: Child) -> Any:
        """Starts a child, waits for it and returns what it printed.

        Raises:
            RuntimeError: it failed, took too long or was killed; the message says which, and ends with what it wrote
                to standard error.
        """
        self.start(child)
        return self._results[child].result()

    def close(self) -> None:
        """Kills what runs and forgets what waits; nothing can be started after."""
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in tuple(self._running):
            process.kill()

    def _run(self, child: Child) -> Any:
        with subprocess.Popen(
            child.command,
            cwd=_ROOT,
            env=os.environ | _ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            self._running.add(process)
            if self._closed:
                process.kill()
            try:
                printed, said = process.communicate(timeout=child.limit_s)
                end = f"ended with {process.returncode}"
            except subprocess.TimeoutExpired:
                process.kill()
                printed, said = process.communicate()
                end = f"took longer than {child.limit_s:g} s"
            self._running.discard(process)
        if process.returncode != 0:
            raise RuntimeError(f"`{' '.join(child.command)}` {end}: {said[-_LAST_WORDS:]}")
        return json.loads(printed.splitlines()[-1])

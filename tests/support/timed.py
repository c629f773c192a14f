"""How long calls take."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any


class Timed:
    """How long calls took, by name: by the clock, and by what their thread computed, as others want the CPUs, too."""

    def __init__(self):
        self.calls: Counter[str] = Counter()
        self.total_s: defaultdict[str, float] = defaultdict(float)
        self.longest_s: dict[str, float] = {}
        self.longest_cpu_s: dict[str, float] = {}

    def watch(self, owner: Any, method: str) -> None:
        """Times a method of an object from now on."""
        call: Callable[..., Any] = getattr(owner, method)

        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                took, computed = time.perf_counter() - start, time.thread_time() - cpu
                self.calls[method] += 1
                self.total_s[method] += took
                self.longest_s[method] = max(self.longest_s.get(method, 0.0), took)
                self.longest_cpu_s[method] = max(self.longest_cpu_s.get(method, 0.0), computed)

        setattr(owner, method, timed)

    def summary(self) -> dict[str, dict[str, float]]:
        """Milliseconds by name: the mean and the longest one, and the longest by the thread's own time."""
        means = {name: total / self.calls[name] for name, total in self.total_s.items()}
        found = {"mean_ms": means, "longest_ms": self.longest_s, "longest_cpu_ms": self.longest_cpu_s}
        return {key: {name: round(s * 1e3, 3) for name, s in times.items()} for key, times in found.items()}

"""The steps that `kvjax bench miss` times."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvjax.cli.bench_miss_model import TOKENS_PER_BLOCK, VOCABULARY, decode_step, layout_of, new_caches, random_weights
from kvjax.cli.doctor_probe import local_devices
from kvjax.observe.progress import progress_bar
from kvjax.offloader import JobResult, Offloader

_RUNNING = "running"


class Decoding:
    """One sequence that is decoded, and an offloader whose lookups never hit.

    Args:
        num_layers: layers of the model.
        width: elements of a hidden state.
        prompt_tokens: tokens before the first step.
        store_tokens: tokens of the prefix that a store under way stores.
        max_steps: calls of `step_with_offloader` to come.
    """

    def __init__(self, num_layers: int, width: int, *, prompt_tokens: int, store_tokens: int, max_steps: int):
        device = local_devices([])[0]
        layout = layout_of(num_layers)
        num_blocks = -(-(prompt_tokens + max_steps) // TOKENS_PER_BLOCK)
        self._rng = np.random.default_rng(0)
        self._weights = jax.device_put(random_weights(jax.random.key(0), num_layers, width), device)
        self._step = decode_step()
        self._caches = new_caches(layout, num_blocks, device)
        self._table = jax.device_put(np.arange(num_blocks, dtype=np.int32), device)
        self._tables = {name: np.arange(num_blocks) for name in layout.names}
        self._prompt_tokens, self._store_tokens = prompt_tokens, store_tokens
        self._position, self._token = prompt_tokens, 0
        held = sum(cache.nbytes for cache in self._caches.values())
        self.offloader = Offloader(layout, self._caches, host_bytes=4 * held, show_progress=False)
        self._begin(_RUNNING, prompt_tokens)
        self._caches, job = self.offloader.store(self._caches, _RUNNING, self._tables, prompt_tokens)
        self.offloader.wait(job)

    def step(self) -> float:
        """Computes the token at the next position; returns the seconds that it took."""
        start = time.perf_counter()
        self._token = int(self._dispatched())
        return time.perf_counter() - start

    def step_with_offloader(self) -> tuple[float, float]:
        """As `step`, and tells the offloader of the token; moves on to the next position.

        Returns:
            The seconds of the step, and of those the seconds inside the offloader's calls.
        """
        start = time.perf_counter()
        known, token = self._token, self._dispatched()
        before = time.perf_counter()
        self.offloader.extend(_RUNNING, [known])
        self._position += 1
        self._caches, _ = self.offloader.store(self._caches, _RUNNING, self._tables, self._position)
        self.offloader.poll()
        after = time.perf_counter()
        self._token = int(token)
        return time.perf_counter() - start, after - before

    def step_beside_store(self) -> tuple[float, JobResult]:
        """Begins to store the prefix of another request, then as `step`.

        Returns:
            The seconds of both, and what the store moved.
        """
        request = self._begin("stored", self._store_tokens)
        start = time.perf_counter()
        self._caches, job = self.offloader.store(self._caches, request, self._tables, self._store_tokens)
        self._token = int(self._dispatched())
        seconds = time.perf_counter() - start
        result = self.offloader.wait(job)
        self.offloader.finish(request)
        if not result.ok or not result.num_bytes:
            raise RuntimeError(f"a store of {self._store_tokens} tokens must move bytes, got {result}")
        return seconds, result

    def lookup(self) -> float:
        """Looks a request up that is not known; returns the seconds."""
        tokens = self._rng.integers(0, VOCABULARY, self._prompt_tokens)
        start = time.perf_counter()
        found = self.offloader.lookup("missed", tokens)
        seconds = time.perf_counter() - start
        self.offloader.finish("missed")
        if found.hit_tokens:
            raise RuntimeError(f"a lookup of random tokens must miss, got {found.hit_tokens} tokens")
        return seconds

    def _begin(self, request: str, num_tokens: int) -> str:
        self.offloader.lookup(request, self._rng.integers(0, VOCABULARY, num_tokens))
        return request

    def _dispatched(self) -> jax.Array:
        token, position = np.int32(self._token), np.int32(self._position)
        token, self._caches = self._step(self._weights, self._caches, token, position, self._table)
        return token


def figures(num_layers: int, width: int, *, steps: int, prompt_tokens: int, store_tokens: int) -> dict[str, Any]:
    """Returns the medians over `steps` rounds, after one that warms up. See `Decoding` for the arguments."""
    decoding = Decoding(num_layers, width, prompt_tokens=prompt_tokens, store_tokens=store_tokens, max_steps=steps + 1)
    kinds: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("off", decoding.step),
        ("on", decoding.step_with_offloader),
        ("store", decoding.step_beside_store),
        ("lookup", decoding.lookup),
    )
    taken: dict[str, list[Any]] = {name: [] for name, _ in kinds}
    with decoding.offloader, progress_bar("bench miss", steps + 1) as advance:
        for n in range(steps + 1):
            for i in range(len(kinds)):  # each kind follows each other one as often
                name, call = kinds[(i + n) % len(kinds)]
                taken[name].append(call())
            advance(1)
    off = _median_ms(taken["off"][1:])
    on = _median_ms(seconds for seconds, _ in taken["on"][1:])
    calls = _median_ms(seconds for _, seconds in taken["on"][1:])
    store = _median_ms(seconds for seconds, _ in taken["store"][1:])
    lookup = _median_ms(taken["lookup"][1:])
    device = jax.devices()[0]
    return {
        "backend": device.platform,
        "device": device.device_kind,
        "jax": jax.__version__,
        "ms_per_step_off": round(off, 4),
        "ms_per_step_on": round(on, 4),
        "cost_percent": round(100 * (on / off - 1), 3),
        "calls_ms_per_step": round(calls, 4),
        "calls_percent": round(100 * calls / off, 3),
        "ms_per_step_store": round(store, 4),
        "store_cost_percent": round(100 * (store / off - 1), 3),
        "store_bytes": taken["store"][-1][1].num_bytes,
        "lookup_ms": round(lookup, 4),
        "lookup_percent": round(100 * lookup / off, 3),
    }


def _median_ms(seconds: Any) -> float:
    return 1e3 * statistics.median(seconds)

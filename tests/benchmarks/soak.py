"""A soak: 64 requests at a time, in a host pool that is too small, with faults, for as long as one likes.

    python -m tests.benchmarks.soak --minutes 60 --seed 1 --transfer direct [--policy arc] [--json]

Prompts share prefixes as the leaves of a tree do, go on over several turns, abort, are preempted and admitted again,
share loads, are cancelled and late, while chunks are invalidated and transfers fail. Every restored block is compared
byte by byte with what its tokens must have written, and every other block with what it was. At the end everything
has finished and nothing is left behind. It stops at the first wrong byte, contradiction or lost result, and exits
with 1 then, or if anything leaked.
"""

import argparse
import gc
import json
import os
import sys
import threading
import time
from collections import deque
from typing import Any

import numpy as np

import kvjax
from kvjax.observe.events import KVEvent
from kvjax.observe.progress import progress_bar
from kvjax.pool import POLICIES
from tests.support.faults import Fault, FaultyTransport, RandomFaults, inject
from tests.support.ledgers import clear_away
from tests.support.lives import Life, Lives
from tests.support.serving_engine import Served, ServingEngine
from tests.support.timed import Timed
from tests.support.toy_engine import OutOfBlocksError

LAYOUT = kvjax.CacheLayout(
    [
        kvjax.GroupSpec(
            "full",
            kvjax.FullAttention(),
            4,
            (kvjax.LeafSpec("k", (4, 8), "uint8"), kvjax.LeafSpec("v", (4, 4), "uint16")),
        ),
        kvjax.GroupSpec("window", kvjax.SlidingWindow(12), 4, (kvjax.LeafSpec("w", (4, 8), "uint8", layers=2),)),
        kvjax.GroupSpec("ring", kvjax.Scratch(), 2, block_bytes=8),
        kvjax.GroupSpec(
            "state",
            kvjax.Recurrent(),
            8,
            (kvjax.LeafSpec("ssm", (6,), "uint32"), kvjax.LeafSpec("conv", (4,), "uint16")),
        ),
    ]
)
NUM_BLOCKS = 1024  # of each cache: too few for the longest requests all at once
HOST_BYTES = 96 * 1024
MOST_REQUESTS = 64
MOST_TOKENS = 160
FAULT_RATES = {Fault.RAISE: 0.001, Fault.FAIL: 0.002, Fault.HANG: 0.0005, Fault.LATE: 0.06, Fault.SHORT: 0.001}
DEADLINE_S = 0.5
MIB = 2**20
EAGER = 0.5  # how often a request goes on before it knows how its load ended
WARM_UP = 0.1  # of the time, after which memory must not grow


class Soak:
    """An engine under load.

    Args:
        seed: of everything that happens.
        transfer: `"direct"` or `"staged"`.
        policy: of the host pool, a name of `POLICIES`.
        most_requests: requests at a time.
        host_bytes: budget of the host pool.
        fault_rates: how likely each fault is, for each piece of a move.
    """

    def __init__(
        self,
        seed: int,
        *,
        transfer: str = "direct",
        policy: str = "lru",
        most_requests: int = MOST_REQUESTS,
        host_bytes: int = HOST_BYTES,
        fault_rates: dict[Fault, float] = FAULT_RATES,
    ):
        self.rng = np.random.default_rng(seed)
        self.most_requests = most_requests
        self.threads = set(threading.enumerate())
        self.told: set[bytes] = set()  # keys of chunks that are resident by the events
        self.misled = 0  # chunks told to be stored that were there, or to be removed that were not
        self.engine = ServingEngine(
            LAYOUT,
            NUM_BLOCKS,
            seed=seed,
            host_bytes=host_bytes,
            blocks_per_chunk={"full": 2},
            checkpoint_tokens=32,
            transfer=transfer,
            staging_bytes=4096,
            policy=POLICIES[policy](),
            deadline_s=DEADLINE_S,
            on_event=self._on_event,
        )
        self.offloader = self.engine.offloader
        self.faulty: FaultyTransport = inject(self.offloader, RandomFaults(seed, fault_rates), num_polls=40)
        self.files = _open_files()
        self.timed = Timed()
        for method in ("lookup", "poll"):
            self.timed.watch(self.offloader, method)
        for method in ("prepare_load", "prepare_store"):
            self.timed.watch(self.offloader.ledger, method)
        self.lives = Lives(self.engine)
        self.done = self.lives.done
        self.running: list[Life] = []
        self.history: deque[tuple[bytes, np.ndarray]] = deque(maxlen=100)
        self.trunks = [self._tokens(int(self.rng.integers(8, 56))) for _ in range(8)]
        self.branches = {(t, b): self._tokens(int(self.rng.integers(6, 30))) for t in range(8) for b in range(3)}
        self.num_made = 0

    # --- what happens

    def tick(self) -> None:
        """Something happens to some of the requests."""
        self.done["ticks"] += 1
        self.lives.hear(self.offloader.poll(), keeps=self._chance(0.5))
        while len(self.running) < self.most_requests:
            self.running.append(self._new_request())
        for at in self.rng.permutation(len(self.running))[:8].tolist():
            self._act(self.running[at])
        self.running = [one for one in self.running if one.state != "finished"]
        if self._chance(0.05):
            self.faulty.release(1)
        if self._chance(0.002):
            self._invalidate()
        if self.done["ticks"] % 25 == 0:
            self.check()

    def check(self) -> None:
        """The books agree, every byte of the device is right, and the events tell what is resident."""
        self.offloader.check_integrity()
        self.engine.check_caches()
        self.engine.check_blocks([one.served for one in self.running])
        assert not self.faulty.violations, self.faulty.violations
        pool = self.offloader.ledger.pool
        held = pool.held_keys()
        found = {key for key, slot in zip(held, pool.find(held).tolist(), strict=True) if slot >= 0}
        assert found <= self.told, "what lookups find was told"
        assert not self.misled, "a chunk is stored before it is removed, and not stored twice"
        self.done["integrity_checks"] += 1

    def drain(self) -> dict[str, int]:
        """Ends all requests and closes the offloader. Returns what was left behind."""
        self.faulty.choose = lambda _operation: None
        for one in self.running:
            self.lives.end(one)
        self.running = []
        self.faulty.release()
        self.lives.hear(self.offloader.wait())
        for job in self.offloader._jobs.unsettled():  # what was given up and is late
            job.transfer.settle()
        self.offloader.see_ended()
        self.check()
        self.offloader.invalidate()
        ledger = self.offloader.ledger
        clear_away(ledger.pool)
        stats = self.offloader.stats()
        self.check()
        inner: Any = self.faulty.inner
        left = {
            "pins": len(ledger.pool.open_pins()),
            "reservations": len(ledger.pool.open_reservations()),
            "namespaces": ledger.pool.namespaces.in_use,
            "units": ledger.pool.num_units - ledger.pool.num_free_units,
            "blocks": sum(int(refs.sum()) for refs in self.engine.refs.values()),
            "staged_units": inner._staged_units() if hasattr(inner, "_staged_units") else 0,
            "files": _open_files() - self.files,
            "requests": stats.open_requests,
            "jobs": stats.open_jobs + stats.given_up_jobs + len(self.lives.jobs),
            "events": len(self.told),
        }
        self.offloader.close()
        return left | {"threads": len(set(threading.enumerate()) - self.threads)}

    # --- a request

    def _act(self, one: Life) -> None:
        if self._chance(0.004):
            self.done["aborted"] += 1
            self.lives.end(one)
        elif one.state == "waiting":
            self._admit(one)
        elif one.state == "loading":
            self._while_loading(one)
        else:
            self._step(one)

    def _admit(self, one: Life, *, on_device: bool = False) -> None:
        limits: dict[str, Any] = {}
        if self._chance(0.05):
            name = ("max_store_tokens", "max_load_tokens", "skip")[int(self.rng.integers(3))]
            limits[name] = True if name == "skip" else int(self.rng.integers(0, 64))
        self.lives.look_up(one, on_device=on_device, **limits)
        if self._chance(0.02):  # looked up, never loaded; and looked up again later
            return
        if self._chance(0.003):
            self._invalidate()
        deadline_s = float(self.rng.choice([0.0, 0.0005, 0.005])) if self._chance(0.02) else None
        try:
            self.lives.load(one, share=self._chance(0.7), fills=self._chance(0.2), deadline_s=deadline_s)
        except OutOfBlocksError:
            self._preempt_another(one)
            return
        if self._chance(0.03):
            self.lives.cancel(one)

    def _while_loading(self, one: Life) -> None:
        if self._chance(0.05):
            self.lives.cancel(one)
        elif self._chance(0.05):
            self.lives.preempt(one, store=self._chance(0.8))
        elif self._chance(EAGER):
            self._step(one)

    def _step(self, one: Life) -> None:
        served = one.served
        if served.written == len(served.tokens):
            if served.written >= one.goal:
                self.done["requests"] += 1
                self.history.append((served.salt, served.tokens))
                self.lives.end(one)
                return
            self.lives.accept(one, self._tokens(int(self.rng.integers(1, 5))))
        try:
            store = self.lives.step(one, int(self.rng.choice([1, 4, 9, 24, 64])))
        except OutOfBlocksError:
            self._preempt_another(one)
            return
        if one.state == "computing":
            if self._chance(0.02):
                self.lives.preempt(one, store=self._chance(0.8))
            elif self._chance(0.01):
                self._admit(one, on_device=True)
            elif self._chance(0.01):
                self.offloader.cancel(store)

    def _preempt_another(self, one: Life) -> None:
        """Makes room for a request that found no block: another one gives up its own, or, if none can, it does."""
        others = [other for other in self.running if other is not one and other.state == "computing"]
        self.lives.preempt(others[int(self.rng.integers(len(others)))] if others else one, store=self._chance(0.8))
        if one.state == "waiting":
            self.engine.drop_blocks(one.served)

    # --- parts

    def _new_request(self) -> Life:
        self.num_made += 1
        salt = (b"", b"", b"", b"tenant", b"other")[int(self.rng.integers(5))]
        kind = self.rng.random()
        if kind < 0.5 and self.history:
            salt, tokens = self.history[int(self.rng.integers(len(self.history)))]
            if kind < 0.42:
                self.done["later_turns"] += 1
                tokens = np.concatenate([tokens, self._tokens(int(self.rng.integers(1, 24)))])
        else:
            trunk = int(self.rng.integers(len(self.trunks)))
            parts = [self.trunks[trunk]]
            if self._chance(0.7):
                parts.append(self.branches[trunk, int(self.rng.integers(3))])
            tokens = np.concatenate([*parts, self._tokens(int(self.rng.integers(1, 30)))])
        tokens = tokens[-MOST_TOKENS:] if len(tokens) > MOST_TOKENS + 40 else tokens
        self.done["turns"] += 1
        served = Served(self.num_made, tokens, salt)
        return Life(served, len(tokens) + int(self.rng.integers(0, 30)))

    def _tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(0, 1000, count)

    def _chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def _invalidate(self) -> None:
        self.done["invalidations"] += 1
        kind = int(self.rng.integers(4))
        if kind == 0:
            self.engine.update_model()
        else:
            self.engine.invalidate((None, b"tenant", b"")[kind - 1])

    def _on_event(self, event: KVEvent) -> None:
        keys = set(event.keys)
        self.done[f"events {event.kind}"] += len(keys)
        self.misled += len(keys & self.told) if event.kind == "stored" else len(keys - self.told)
        (self.told.update if event.kind == "stored" else self.told.difference_update)(keys)


def run(soak: Soak, seconds: float, *, show_progress: bool | None = None) -> dict[str, Any]:
    """Runs a soak for so long, and returns its summary."""
    start = time.monotonic()
    memory = {"start": _memory_mib()}
    with progress_bar("soak", seconds, show=show_progress) as advance:
        now = start
        while now - start < seconds:
            soak.tick()
            before, now = now, time.monotonic()
            advance(now - before)
            if "warm" not in memory and now - start >= WARM_UP * seconds:
                gc.collect()
                memory["warm"] = _memory_mib()
    gc.collect()
    memory["end"] = _memory_mib()
    stats = soak.offloader.stats()
    left = soak.drain()
    leaks = {name: number for name, number in left.items() if number}
    faults = {f"{operation} {fault}": number for (operation, fault), number in sorted(soak.faulty.counts.items())}
    return {
        "bench": "soak",
        "seconds": round(time.monotonic() - start, 1),
        "requests_finished": soak.done["requests"],
        "turns": soak.done["turns"],
        "later_turns": soak.done["later_turns"],
        "aborted": soak.done["aborted"],
        "preemptions": soak.done["preemptions"],
        "lookups": soak.timed.calls["lookup"],
        "lookups_with_a_hit": soak.done["hits"],
        "hit_tokens": stats.hit_tokens,
        "lookup_tokens": stats.lookup_tokens,
        "loads": soak.done["loads"],
        "shared_loads": stats.shared_loads,
        "stores": soak.timed.calls["prepare_store"],
        "chunks_loaded": stats.chunks_loaded,
        "chunks_stored": stats.chunks_stored,
        "evicted_chunks": stats.evicted_chunks,
        "restored_bytes_compared": soak.engine.bytes_compared,
        "integrity_checks": soak.done["integrity_checks"],
        "faults": faults,
        "failed_jobs": stats.failed_jobs,
        "cancelled_jobs": stats.cancelled_jobs,
        "late_jobs": stats.late_jobs,
        "outdated_stores": stats.outdated_stores,
        "told_to_be_failed": soak.done["failed"],
        "invalidations": soak.done["invalidations"],
        "events": soak.done["events stored"] + soak.done["events removed"],
        "memory_mib": {name: round(mib, 1) for name, mib in memory.items()},
        "leaks": leaks,
    } | soak.timed.summary()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _memory_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transfer", choices=["direct", "staged"], default="direct")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="lru")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    arguments = parser.parse_args()
    soak = Soak(arguments.seed, transfer=arguments.transfer, policy=arguments.policy)
    try:
        summary = run(soak, 60 * arguments.minutes)
    except BaseException:
        print(f"seed {arguments.seed}, tick {soak.done['ticks']}", file=sys.stderr)
        raise
    summary |= {"seed": arguments.seed, "transfer": arguments.transfer, "policy": arguments.policy}
    if arguments.json:
        print(json.dumps(summary))
    else:
        for name, value in summary.items():
            print(f"{name:24} {value}")
    return 1 if summary["leaks"] else 0


if __name__ == "__main__":
    sys.exit(main())

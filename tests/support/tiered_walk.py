"""A random walk of requests over an offloader with tiers below its host pool, in which anything may go wrong.

What threads do is not repeatable, so this is no hypothesis machine; the engine compares every byte all the same (see
`tests.support.serving_engine`).
"""

from collections import OrderedDict

import numpy as np

import kvjax
from tests.support.faults import Fault as MoveFault
from tests.support.faults import FaultsInOrder, inject
from tests.support.lives import Life, Lives
from tests.support.served import check_nothing_is_left
from tests.support.serving_engine import Served, ServingEngine
from tests.support.tier_faults import Fault, RandomFaults, no_faults
from tests.support.tiers import FaultyTier, MemoryTier

LAYOUT = kvjax.CacheLayout(
    [
        kvjax.GroupSpec("full", kvjax.FullAttention(), 2, (kvjax.LeafSpec("k", (2, 4), "uint8"),)),
        kvjax.GroupSpec("window", kvjax.SlidingWindow(6), 4, (kvjax.LeafSpec("w", (4, 4), "uint16", layers=2),)),
        kvjax.GroupSpec("ring", kvjax.Scratch(), 2, block_bytes=8),
        kvjax.GroupSpec("state", kvjax.Recurrent(), 4, (kvjax.LeafSpec("s", (5,), "uint32"),)),
    ]
)
NUM_BLOCKS = 200
TRUNKS = tuple(
    np.array(trunk)
    for trunk in ([0] * 48, [0] * 12 + [1] * 36, [0] * 12 + [1] * 8 + [2] * 28, [3] * 40, [4] * 24 + [0] * 24)
)
NAMES = "abcdef"
SOON_S = 0.02


class QuietLives(Lives):
    """The results of promotions are of no interest to requests."""

    def hear(self, results, *, keeps=False):
        super().hear([result for result in results if result.operation != "promote"], keeps=keeps)


class TieredWalk:
    """The walk.

    Args:
        seed: of all that is chosen.
        transfer: of the offloader.
        host_bytes: of the host pool.
        write: how the upper tier is written to; the lower one is written through.
    """

    def __init__(self, seed: int, *, transfer: str, host_bytes: int, write: str):
        self.rng = np.random.default_rng(seed)
        self.options = {"transfer": transfer, "host_bytes": host_bytes}
        self.write = write
        self.entries = [OrderedDict[str, bytes](), OrderedDict[str, bytes]()]
        self.weights = 0
        self.model = ""
        self.of_tenant: dict[bytes, int] = {}
        self.seen = {"bytes_compared": 0, "promoted": 0, "bad": 0, "faults": 0, "written": 0, "restarts": 0}
        self.start()

    def start(self) -> None:
        """A new process, as it were: the host pool is empty, the tiers are what they were."""
        self.tiers = [
            FaultyTier(
                MemoryTier("upper", max_bytes=9000, entries=self.entries[0], write=self.write, timeout_s=SOON_S)
            ),
            FaultyTier(MemoryTier("lower", entries=self.entries[1], timeout_s=SOON_S)),
        ]
        self.engine = ServingEngine(
            LAYOUT,
            NUM_BLOCKS,
            blocks_per_chunk={"full": 2},
            checkpoint_tokens=8,
            model=self.model,
            tiers=self.tiers,
            **self.options,
        )
        self.faulty = inject(self.engine.offloader, num_polls=2, settles=True)
        self.engine.weights, self.engine.of_tenant = self.weights, self.of_tenant
        for salt in (b"", b"tenant"):  # a process clears all namespaces that it has used
            self.engine.offloader.lookup("first", [0], salt=salt)
            self.engine.offloader.finish("first")
        self.lives = QuietLives(self.engine)
        self.known: dict[str, Life] = {}

    def walk(self, steps: int) -> None:
        """Takes so many steps, and ends everything."""
        names = [name for name in dir(self) if name.startswith("do_")]
        odds = np.array([getattr(type(self), name).__doc__.split(":")[0].count("+") for name in names], float)
        for _ in range(steps):
            getattr(self, self.rng.choice(names, p=odds / odds.sum()))()
            self.check()
        self.end()

    def check(self) -> None:
        self.engine.offloader.check_integrity()
        self.engine.check_caches()
        self.engine.check_blocks([one.served for one in self.known.values()])
        assert self.faulty.violations == []

    # --- what may happen; the more +, the more often --------------------------------------------------

    def do_look_up(self) -> None:
        """++++++: a new request, or one that was preempted, and its load."""
        one = self.known.get(name := self.pick(NAMES))
        if one is None or one.state == "finished":
            trunk = TRUNKS[self.rng.integers(len(TRUNKS))]
            salt = b"tenant" if self.rng.random() < 0.2 else b""
            one = self.known[name] = Life(Served(name, trunk[: self.rng.integers(1, len(trunk) + 1)].copy(), salt))
        how = {"restore": self.pick(["auto"] * 6 + ["always", "never"]), "wait_s": self.pick([None] * 4 + [0.0])}
        found = self.lives.look_up(one, **how)
        assert found.promised_tokens >= found.hit_tokens
        if self.rng.random() < 0.1:
            return
        if self.rng.random() < 0.02:
            self.engine.invalidate(one.served.salt)
        self.meet()
        job = self.lives.load(one, share=bool(self.rng.integers(2)))
        if self.rng.random() < 0.5 and not self.faulty.num_hanging:
            self.lives.hear([self.engine.offloader.wait(job)])

    def do_step(self) -> None:
        """++++++++: a step and a store."""
        one = self.some("computing", "loading")
        if one is not None:
            self.meet()
            self.lives.step(one, self.pick([32, 8, 4, 3, 1]), checkpoint=self.rng.random() < 0.3)

    def do_end(self) -> None:
        """+++: a request ends."""
        one = self.some("waiting", "computing", "loading")
        if one is not None:
            self.meet()
            self.lives.end(one)

    def do_preempt(self) -> None:
        """+: a request loses its blocks."""
        one = self.some("computing", "loading")
        if one is not None:
            self.lives.preempt(one, store=bool(self.rng.integers(2)))

    def do_poll(self) -> None:
        """+++: what ended is told."""
        self.lives.hear(self.engine.offloader.poll())

    def do_release(self) -> None:
        """+++: moves that hang end."""
        self.faulty.release(self.pick([1, None]))

    def do_prefetch(self) -> None:
        """+: chunks come ahead of their request, or are given up."""
        job = self.engine.offloader.prefetch(TRUNKS[self.rng.integers(len(TRUNKS))])
        if job is not None and self.rng.random() < 0.3:
            self.engine.offloader.cancel(job)

    def do_flush(self) -> None:
        """+: the tiers get what they lack."""
        self.engine.offloader.flush(timeout_s=SOON_S)

    def do_measure(self) -> None:
        """+: somebody tells how fast tokens are computed."""
        self.engine.offloader.note_prefill(100, float(self.rng.choice([1e-6, 1.0])))

    def do_invalidate(self) -> None:
        """+: what was stored is worth nothing any more."""
        what = self.rng.random()
        if what < 0.1:
            self.engine.update_model()
            self.model = f"weights {self.engine.weights}"
        elif what < 0.4:
            self.engine.invalidate(None if what < 0.2 else b"tenant")
        self.weights, self.of_tenant = self.engine.weights, self.engine.of_tenant

    def do_fare(self) -> None:
        """++: from now on some of what a tier does goes wrong, or everything, or nothing."""
        for level in self.engine.offloader._flow.levels:
            level.health.answered()  # as if time had passed
        tier = self.tiers[self.rng.integers(2)]
        how = self.rng.random()
        if how < 0.5:
            tier.choose = no_faults
        elif how < 0.9:
            rate = self.pick([0.05, 0.3])
            tier.choose = RandomFaults(int(self.rng.integers(2**32)), {fault: rate / len(Fault) for fault in Fault})
        else:
            fault = self.pick([Fault.UNAVAILABLE, Fault.IO_ERROR, Fault.HANG])
            tier.choose = lambda *_: fault

    def do_restart(self) -> None:
        """+: the process ends, well, and another one begins."""
        if self.rng.random() < 0.3:
            weights = self.engine.weights
            self.end()
            self.weights = weights
            self.seen["restarts"] += 1
            self.start()

    # --- parts ----------------------------------------------------------------------------------------

    def end(self) -> None:
        """Everything ends; nothing is left behind."""
        for one in self.known.values():
            if one.state != "finished":
                self.lives.end(one)
        self.faulty.release()
        self.lives.hear(self.engine.offloader.wait())
        assert self.lives.jobs == {}
        for tier in self.tiers:
            tier.choose = no_faults
            tier.settle()
            tier.timeout_s = 60.0
        stats = self.engine.offloader.stats()
        self.seen["bytes_compared"] += self.engine.bytes_compared
        self.seen["promoted"] += stats.chunks_promoted
        self.seen["bad"] += sum(tier.bad_chunks for tier in stats.tiers)
        self.seen["written"] += sum(tier.chunks_written for tier in stats.tiers)
        self.seen["faults"] += sum(tier.counts.total() for tier in self.tiers)
        for level in self.engine.offloader._flow.levels:
            level.health.answered()
        self.engine.offloader.flush(timeout_s=60)  # what was under way may fail still
        assert self.engine.offloader.flush(timeout_s=60), "what was invalidated is deleted"
        entries = [OrderedDict(held) for held in self.entries]
        check_nothing_is_left(self.engine, self.faulty)
        self.engine.offloader.close(timeout_s=10)
        for held, before in zip(self.entries, entries, strict=True):
            held.clear()
            held.update(before)  # the check has invalidated all

    def meet(self) -> None:
        """What goes wrong with the next moves."""
        self.faulty.choose = FaultsInOrder(self.pick([None] * 6 + [*MoveFault]) for _ in range(3))

    def pick(self, options):
        return options[int(self.rng.integers(len(options)))]

    def some(self, *states: str) -> Life | None:
        known = [one for one in self.known.values() if one.state in states]
        return self.pick(known) if known else None

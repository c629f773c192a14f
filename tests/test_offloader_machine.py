"""Requests that share prefixes, on real caches, through any sequence of calls, faults and cancellations.

The engine compares every byte: of each load what it restored and what it must leave alone, and what each token that is
read must hold (`tests.support.serving_engine`). Bookkeeping alone is tested by `tests/test_ledger_machine.py`.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvjax
from tests.support.faults import Fault, FaultsInOrder, FaultyTransport, inject
from tests.support.lives import Life, Lives
from tests.support.machines import machine_settings
from tests.support.served import check_nothing_is_left
from tests.support.serving_engine import Served, ServingEngine

LAYOUT = kvjax.CacheLayout(
    [
        kvjax.GroupSpec("full", kvjax.FullAttention(), 2, (kvjax.LeafSpec("k", (2, 4), "uint8"),)),
        kvjax.GroupSpec("window", kvjax.SlidingWindow(6), 4, (kvjax.LeafSpec("w", (4, 4), "uint16", layers=2),)),
        kvjax.GroupSpec("ring", kvjax.Scratch(), 2, block_bytes=8),
        kvjax.GroupSpec("state", kvjax.Recurrent(), 4, (kvjax.LeafSpec("s", (5,), "uint32"),)),
    ]
)
NUM_BLOCKS = 200
TRUNKS = ([0] * 32, [0] * 12 + [1] * 20, [0] * 12 + [1] * 8 + [2] * 12)
NAMES = st.sampled_from("abcd")
FAULTS = st.lists(st.sampled_from([None, None, *Fault]), max_size=5)  # of the next pieces
# Engines that no example uses now, by transfer and budget: compiling them takes longer than an example.
_IDLE: dict[tuple[str, int], tuple[ServingEngine, FaultyTransport]] = {}


def engine_of(transfer: str, host_bytes: int) -> tuple[ServingEngine, FaultyTransport]:
    """An engine whose host pool is empty; one that failed is not used again."""
    idle = _IDLE.pop((transfer, host_bytes), None)
    if idle is not None:
        return idle
    engine = ServingEngine(
        LAYOUT,
        NUM_BLOCKS,
        host_bytes=host_bytes,
        transfer=transfer,
        blocks_per_chunk={"full": 2},
        checkpoint_tokens=8,
    )
    return engine, inject(engine.offloader, num_polls=2, settles=True)


class OffloaderMachine(RuleBasedStateMachine):
    @initialize(transfer=st.sampled_from(["direct", "staged"]), host_bytes=st.sampled_from([400, 2000]))
    def start(self, transfer, host_bytes):
        self.kind = transfer, host_bytes
        self.engine, self.faulty = engine_of(transfer, host_bytes)
        self.offloader, self.lives = self.engine.offloader, Lives(self.engine)
        self.known: dict[str, Life] = {}

    def meet(self, faults) -> None:
        """What goes wrong until the next rule."""
        self.faulty.choose = FaultsInOrder(faults)

    def some(self, data, *states) -> Life:
        return data.draw(st.sampled_from([one for one in self.known.values() if one.state in (states or (one.state,))]))

    def are(self, *states) -> bool:
        return any(one.state in states for one in self.known.values())

    def one_of(self, name, tokens, salt=b"") -> Life:
        """The request of that name, or a new one."""
        if name not in self.known or self.known[name].state == "finished":
            self.known[name] = Life(Served(name, np.array(tokens), salt))
        return self.known[name]

    @rule(
        name=NAMES,
        trunk=st.sampled_from(TRUNKS),
        length=st.sampled_from([32, 24, 17, 16, 13, 9, 4, 1]),
        salt=st.sampled_from([b"", b"", b"", b"tenant"]),
        limits=st.sampled_from([{}] * 6 + [{"skip": True}, {"max_load_tokens": 8}, {"max_store_tokens": 12}]),
        loads=st.sampled_from(["in flight"] * 3 + ["waited for", "late", "cancelled", "never", "outdated"]),
        share=st.booleans(),
        fills=st.booleans(),
        faults=FAULTS,
    )
    def look_up(self, name, trunk, length, salt, limits, loads, share, fills, faults):
        """A new request, or one that was preempted and is admitted again, and its load."""
        one = self.one_of(name, trunk[:length], salt)
        self.lives.look_up(one, **limits)
        self.meet(faults)
        if loads == "never":
            return
        if loads == "outdated":
            self.engine.invalidate(one.served.salt)
        job = self.lives.load(one, share=share, fills=fills, deadline_s=0.0 if loads == "late" else None)
        if loads == "waited for" and not self.faulty.num_hanging:
            self.lives.hear([self.offloader.wait(job)], keeps=fills)
        elif loads == "cancelled":
            self.lives.cancel(one)

    @precondition(lambda self: not self.faulty.num_hanging)
    @rule(
        trunk=st.sampled_from(TRUNKS), length=st.sampled_from([32, 24, 16, 9]), num_tokens=st.sampled_from([32, 8, 3])
    )
    def serve(self, trunk, length, num_tokens):
        """A whole request between the steps of the others."""
        self.meet([])
        one = Life(Served("whole", np.array(trunk[:length])))
        self.lives.look_up(one)
        self.lives.hear([self.offloader.wait(self.lives.load(one))])
        while one.served.written < length:
            self.lives.step(one, num_tokens)
        self.lives.end(one)

    @rule(
        names=st.lists(NAMES, min_size=2, max_size=3, unique=True),
        trunk=st.sampled_from(TRUNKS),
        under_way=st.sampled_from([Fault.HANG, Fault.LATE]),
        faults=FAULTS,
    )
    def load_together(self, names, trunk, under_way, faults):
        """Requests with one prompt, which share what is under way for those before them."""
        self.meet([under_way, *faults])
        for name in names:
            one = self.one_of(name, trunk)
            self.lives.look_up(one)
            self.lives.load(one, share=True)

    @precondition(lambda self: self.are("computing"))
    @rule(data=st.data(), share=st.booleans(), faults=FAULTS)
    def look_up_on_the_device(self, data, share, faults):
        """A request that keeps its blocks asks what the host has beyond them."""
        one = self.some(data, "computing")
        self.lives.look_up(one, on_device=True)
        self.meet(faults)
        self.lives.load(one, share=share)

    @precondition(lambda self: self.are("computing", "loading"))
    @rule(
        data=st.data(),
        num_tokens=st.sampled_from([32, 8, 4, 3, 1]),
        checkpoint=st.booleans(),
        ends=st.sampled_from(["in flight"] * 4 + ["late", "cancelled"]),
        faults=FAULTS,
    )
    def step(self, data, num_tokens, checkpoint, ends, faults):
        """A step and a store, of a request that perhaps does not know yet how its load ended."""
        one = self.some(data, "computing", "loading")
        self.meet(faults)
        job = self.lives.step(one, num_tokens, checkpoint=checkpoint, deadline_s=0.0 if ends == "late" else None)
        if ends == "cancelled":
            self.offloader.cancel(job)

    @precondition(lambda self: self.are("computing", "loading"))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def accept(self, data, tokens):
        one = self.some(data, "computing", "loading")
        if len(one.served.tokens) < 48:
            self.lives.accept(one, np.array(tokens))

    @precondition(lambda self: self.are("loading"))
    @rule(data=st.data())
    def cancel(self, data):
        self.lives.cancel(self.some(data, "loading"))

    @precondition(lambda self: self.are("computing", "loading"))
    @rule(data=st.data(), store=st.booleans(), faults=FAULTS)
    def preempt(self, data, store, faults):
        """Perhaps with a load and stores in flight."""
        one = self.some(data, "computing", "loading")
        self.meet(faults)
        self.lives.preempt(one, store=store)

    @precondition(lambda self: self.are("waiting", "computing", "loading"))
    @rule(data=st.data(), faults=FAULTS)
    def finish(self, data, faults):
        """Perhaps with a load and stores in flight, or after a lookup that led to nothing."""
        one = self.some(data, "waiting", "computing", "loading")
        self.meet(faults)
        self.lives.end(one)

    @rule(keeps=st.booleans())
    def poll(self, keeps):
        self.lives.hear(self.offloader.poll(), keeps=keeps)

    @rule(most=st.sampled_from([1, None]))
    def release(self, most):
        """What hangs ends."""
        self.faulty.release(most)

    @rule(what=st.sampled_from(["all", "a tenant", "the weights"]), rarely=st.integers(0, 5))
    def invalidate(self, what, rarely):
        if rarely < 5:
            return
        if what == "the weights":
            self.engine.update_model()
        else:
            self.engine.invalidate(None if what == "all" else b"tenant")

    @invariant()
    def books_and_bytes_are_right(self):
        if not hasattr(self, "engine"):
            return
        self.offloader.check_integrity()
        self.engine.check_caches()
        self.engine.check_blocks([*(one.served for one in self.known.values())])
        assert self.faulty.violations == []
        assert self.offloader.ledger.num_requests == sum(
            one.looked_up and one.state != "finished" for one in self.known.values()
        )

    def teardown(self):
        """Everything ends; nothing is left behind, and every result was told once."""
        if not hasattr(self, "engine"):
            return
        for one in self.known.values():
            if one.state != "finished":
                self.lives.end(one)
        self.faulty.release()
        self.lives.hear(self.offloader.wait())
        assert self.lives.jobs == {}
        check_nothing_is_left(self.engine, self.faulty)
        _IDLE[self.kind] = self.engine, self.faulty


TestOffloaderMachine = OffloaderMachine.TestCase
TestOffloaderMachine.settings = machine_settings(20, 30)

"""Many requests with shared prefixes in a tiny pool, through any sequence of calls.

The engine checks every byte: the source of each store, the units of each load when it is planned and when it
ends, every token read, and that no unit is handed out while it is read or written.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvjax import ChunkedLocal, FullAttention, Recurrent, Scratch, SlidingWindow, next_cut
from kvjax.pool import POLICIES
from tests.oracles.layouts import cut, group
from tests.support.fake_engine import FakeEngine
from tests.support.ledgers import clear_away
from tests.support.machines import machine_settings

LAYOUTS = (
    cut(group("full", FullAttention(), 4), group("window", SlidingWindow(6), 2), blocks={"window": 2}),
    cut(group("full", FullAttention(), 2), group("ring", Scratch(), 1), group("state", Recurrent(), 4)),
    cut(
        group("full", FullAttention(), 2, 2), group("chunked", ChunkedLocal(6), 4), group("window", SlidingWindow(5), 2)
    ),
)
TRUNKS = ([0] * 40, [0] * 8 + [1] * 32, [0] * 8 + [1] * 8 + [2] * 24)
LENGTHS = [40, 24, 17, 16, 13, 9, 8, 5, 1]
NAMES = st.sampled_from("abcd")
CHUNK = 64


def masks_of(data, work):
    """Which rows of a load or store went well."""
    flags = st.lists(st.booleans(), min_size=work.plan.num_chunks, max_size=work.plan.num_chunks)
    ok = np.array(data.draw(flags), bool)
    ends = np.cumsum([moves.num_chunks for moves in work.plan.moves])
    parts = np.split(ok, ends[:-1]) if len(ends) else []
    return {moves.group_idx: part for moves, part in zip(work.plan.moves, parts, strict=True)}


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        chunks=st.sampled_from([2, 4, 8, 12, 16, 24]),
        frees=st.sampled_from(["never", "retained", "at once"]),
        checkpoint_tokens=st.sampled_from([None, 6, 8]),
        resume_multiple=st.sampled_from([1, 2]),
        fills=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        store_after=st.sampled_from([1, 1, 1, 2]),
    )
    def start(self, layout, chunks, frees, checkpoint_tokens, resume_multiple, fills, policy, store_after):
        most = max(layout.blocks_per_chunk[g] or 0 for g in layout.layout.cached)
        self.engine = FakeEngine(
            layout,
            num_units=max(chunks, most) * CHUNK,
            frees=frees,
            fills=fills,
            checkpoint_tokens=checkpoint_tokens,
            resume_multiple=resume_multiple,
            policy=POLICIES[policy](),
            store_after=store_after,
        )
        self.ledger = self.engine.ledger

    def loading(self, name: str) -> bool:
        return any(load.request_id == name for load in self.engine.loads)

    @rule(
        name=NAMES,
        trunk=st.sampled_from(TRUNKS),
        length=st.sampled_from(LENGTHS),
        on_device=st.sampled_from([0, 0, 0, 0, 3, 6, 8]),
        salt=st.sampled_from([b"", b"", b"", b"tenant"]),
        load=st.sampled_from(["at once"] * 4 + ["in flight"] * 2 + ["failed", "in part", "taken back", "never"]),
        limits=st.sampled_from([{}] * 5 + [{"skip": True}, {"max_load_tokens": 7}, {"max_store_tokens": 13}]),
        share=st.booleans(),
        data=st.data(),
    )
    def look_up(self, name, trunk, length, on_device, salt, load, limits, share, data):
        """A new request, or one that is preempted and admitted again while its stores are in flight."""
        for under_way in list(self.engine.loads):
            if under_way.request_id == name:
                self.end_with_others(under_way)
        on_device = min(on_device, length - 1)
        found = self.engine.start(name, trunk[:length], salt=salt, on_device=on_device, **limits)
        if limits.get("skip"):
            assert found.hit_tokens == on_device
        assert found.hit_tokens <= on_device + limits.get("max_load_tokens", 60)
        if load == "never":
            return
        prepared = self.engine.load(name, share=share)
        if load == "taken back" and not prepared.after:
            self.engine.take_back(prepared)
        elif load != "in flight" and self.ledger.may_complete(prepared):
            self.engine.end_load(prepared, ok=masks_of(data, prepared) if load == "in part" else load != "failed")

    def end_with_others(self, load):
        for other in load.after:
            if other in self.engine.loads:
                self.end_with_others(other)
        self.engine.end_load(load)

    @rule(trunk=st.sampled_from(TRUNKS), length=st.sampled_from(LENGTHS), step=st.sampled_from([40, 8, 3]))
    def serve(self, trunk, length, step):
        """A whole request between the steps of the others."""
        self.engine.served("whole", trunk[:length], step)

    @precondition(lambda self: self.engine.loads)
    @rule(data=st.data(), how=st.sampled_from(["well"] * 5 + ["failed", "in part"]))
    def end_load(self, data, how):
        load = data.draw(st.sampled_from([load for load in self.engine.loads if self.ledger.may_complete(load)]))
        self.engine.end_load(load, ok=masks_of(data, load) if how == "in part" else how == "well")

    @precondition(lambda self: self.engine.running)
    @rule(
        data=st.data(),
        step=st.sampled_from([40, 16, 8, 4, 3, 1]),
        store=st.sampled_from(["at once"] * 4 + ["in flight"] * 2 + ["failed", "never"]),
        checkpoint=st.booleans(),
    )
    def compute(self, data, step, store, checkpoint):
        """A step, which ends where a state must be stored; perhaps a store; then blocks are freed and used again."""
        name = data.draw(st.sampled_from(sorted(self.engine.running)))
        if self.loading(name):
            return
        request = self.engine.running[name]
        stop = min(len(request.tokens), request.position + step)
        if stop > request.position:
            cut_at = next_cut(self.engine.chunking, request.position, [stop], resume_multiple=self.engine.multiple)
            self.engine.compute(name, min(cut_at, stop))
        if store != "never":
            prepared = self.engine.store(name, checkpoint=checkpoint)
            if store != "in flight":
                self.engine.end_store(prepared, ok=store == "at once")
        self.engine.free(request)

    @precondition(lambda self: any(self.ledger.may_complete(store) for store, _ in self.engine.stores))
    @rule(data=st.data(), how=st.sampled_from(["well"] * 5 + ["failed", "in part"]))
    def end_store(self, data, how):
        ready = [store for store, _ in self.engine.stores if self.ledger.may_complete(store)]
        store = data.draw(st.sampled_from(ready))
        self.engine.end_store(store, ok=masks_of(data, store) if how == "in part" else how == "well")

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def accept(self, data, tokens):
        name = data.draw(st.sampled_from(sorted(self.engine.running)))
        if len(self.engine.running[name].tokens) < 60:
            self.engine.accept(name, tokens)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def finish(self, data):
        """Perhaps with a load or a store in flight."""
        self.engine.finish(data.draw(st.sampled_from(sorted(self.engine.running))))

    @rule(salt=st.sampled_from([None, b"", b"tenant"]), rarely=st.integers(0, 7))
    def invalidate(self, salt, rarely):
        if rarely == 7:
            self.ledger.invalidate(None if salt is None else self.ledger.namespace(salt))

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "engine"):
            return
        self.ledger.check_integrity()
        assert self.ledger.num_requests == len(self.engine.running)

    def teardown(self):
        """Everything ends; nothing is left behind."""
        if not hasattr(self, "engine"):
            return
        for load in list(self.engine.loads):
            self.engine.end_load(load)
        for store, _ in list(self.engine.stores):
            self.engine.end_store(store)
        for name in list(self.engine.running):
            self.engine.finish(name)
        self.ledger.check_integrity()
        assert self.ledger.pool.open_pins() == set()
        self.ledger.invalidate()
        clear_away(self.ledger.pool)
        assert self.ledger.pool.num_free_units == self.ledger.pool.num_units


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = machine_settings(140, 40)

"""Which tokens the scheduler's side stores, call by call."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvjax.groups import CacheLayout, FullAttention, GroupSpec
from kvjax.serving.vllm.books import LedgerBooks
from kvjax.serving.vllm.keys import RequestKeys
from kvjax.serving.vllm.messages import Geometry, Outcome, Report
from kvjax.serving.vllm.options import options_of
from kvjax.serving.vllm.scheduler import SchedulerSide

LAYOUT = CacheLayout([GroupSpec("full0", FullAttention(), 8, block_bytes=64)])
OPTIONS = options_of({"host_bytes": 2**16})


class Recorded(LedgerBooks):
    """Books that note the tokens of each store."""

    def __init__(self):
        super().__init__(OPTIONS, Geometry(LAYOUT, 64, {"full0": 20}), model="m", resume_multiple=8)
        self.stored = []

    def prepare_store(self, request_id, tables, num_tokens, *, checkpoint):
        self.stored.append(num_tokens)
        return super().prepare_store(request_id, tables, num_tokens, checkpoint=checkpoint)


def request_of(tokens, **other):
    plain = {"lora_request": None, "cache_salt": None, "prompt_embeds": None, "mm_features": (), "resumable": False}
    made = SimpleNamespace(request_id="r", num_preemptions=0, **plain | {"block_hashes": []} | other)
    made.all_token_ids, made.num_tokens = list(tokens), len(tokens)
    return made


def output_of(request, num_computed, num_scheduled, new_blocks=None):
    """What vLLM schedules: the first step of a request if there are blocks for it, else another one."""
    new = [] if new_blocks is None else [SimpleNamespace(req_id="r", block_ids=new_blocks, num_computed_tokens=0)]
    again = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    if new_blocks is None:
        again.req_ids, again.new_block_ids, again.num_computed_tokens = ["r"], [None], [num_computed]
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=again,
        num_scheduled_tokens={"r": num_scheduled},
        finished_req_ids=set(),
    )


def side_of(books, *, drafts=False):
    return SchedulerSide(OPTIONS, model="m", keys=RequestKeys(None), resume_multiple=8, drafts=drafts, books=books)


def idle():
    again = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    return SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=again, num_scheduled_tokens={}, finished_req_ids=set()
    )


@pytest.mark.parametrize(("drafts", "stored"), [(False, [20, 24]), (True, [19])])
def test_a_token_that_was_sampled_beside_drafts_was_not_computed(drafts, stored):
    """Of 4 scheduled tokens behind 20, 3 were accepted, and one more sampled: the cache holds a rejected draft at its
    place, however many tokens the step computed."""
    books = Recorded()
    side = side_of(books, drafts=drafts)
    request = request_of(range(20))
    assert side.matched_tokens(request, 0) == 0
    side.orders(output_of(request, 0, 20, [[1, 2, 3, 4]]))
    side.orders(output_of(request, 20, 4))
    request.all_token_ids, request.num_tokens = list(range(24)), 24
    side.orders(idle())
    assert books.stored == stored


def test_nothing_is_planned_for_the_same_tokens_twice():
    books = Recorded()
    side = side_of(books)
    request = request_of(range(20))
    side.matched_tokens(request, 0)
    side.orders(output_of(request, 0, 20, [[1, 2, 3, 4]]))
    for _ in range(3):
        side.orders(idle())
    assert books.stored == [20]


def test_the_end_of_a_request_is_stored_before_it_is_forgotten():
    books = Recorded()
    side = side_of(books)
    request = request_of(range(16))
    side.matched_tokens(request, 0)
    side.orders(output_of(request, 0, 16, [[1, 2]]))
    side.finished(request)
    orders = side.orders(idle())
    assert [order.plan.moves[0].num_chunks for order in orders.stores] == [2]
    assert books.ledger.num_requests == 0


def restorable():
    """A side whose books hold 16 tokens, and a request that asks for them."""
    books = Recorded()
    side = side_of(books)
    first = request_of(range(17))
    side.matched_tokens(first, 0)
    side.orders(output_of(first, 0, 17, [[1, 2, 3]]))
    side.finished(first)
    (order,) = side.orders(idle()).stores
    books.complete(side._open.pop(order.number)[0], {0: [True, True]})
    return side, request_of(range(17))


def test_a_load_that_cannot_be_planned_fails_once(monkeypatch):
    side, request = restorable()

    def planted(request_id, tables):
        raise ValueError("planted")

    monkeypatch.setattr(side.books, "prepare_load", planted)
    assert side.matched_tokens(request, 0) == 16
    side.allocated(request, ([5, 6, 7],), 16)
    (order,) = side.orders(idle()).loads
    assert (order.request_id, order.plan) == ("r", None)
    assert side.matched_tokens(request, 0) == 0, "it is computed now"


def test_blocks_of_vllms_own_hit_are_not_loaded():
    side, request = restorable()
    assert side.matched_tokens(request, 8) == 8
    side.allocated(request, ([5, 6, 7],), 8)
    (order,) = side.orders(idle()).loads
    assert order.plan.moves[0].block_ids.tolist() == [[6]]


def test_what_vllm_does_not_load_after_all_is_free_to_leave():
    """It asks, and then computes the whole prompt for a request that wants logits of it."""
    side, request = restorable()
    assert side.matched_tokens(request, 0) == 16
    assert len(side.books.ledger.request("r").pins.slots) == 2
    side.allocated(request, ([5, 6, 7],), 0)
    assert len(side.books.ledger.request("r").pins.slots) == 0
    assert not side.orders(output_of(request, 0, 17, [[5, 6, 7]])).loads
    side.finished(request)
    assert side.books.ledger.num_requests == 0


def test_what_was_found_before_a_reset_is_not_promised_after():
    side, request = restorable()
    assert side.matched_tokens(request, 0) == 16
    side.reset()
    assert side.matched_tokens(request, 0) == 0


def test_a_question_that_is_asked_again_has_the_same_answer():
    side, request = restorable()
    lookups = side.books.ledger.counts.lookups
    assert [side.matched_tokens(request, 0) for _ in range(3)] == [16, 16, 16]
    assert side.matched_tokens(request, 8) == 8, "vLLM holds more by now"
    assert side.books.ledger.counts.lookups == lookups + 1, "counted once"
    side.allocated(request, ([5, 6, 7],), 8)
    (order,) = side.orders(idle()).loads
    assert order.plan.moves[0].block_ids.tolist() == [[6]], "and what it holds is not loaded"


def test_a_request_that_waits_is_named_once_and_finds_what_comes_meanwhile(monkeypatch):
    """vLLM asks in every step for a request for which it has no blocks; to hash a long prompt each time would cost it
    more than the step."""
    books = Recorded()
    side = side_of(books)
    lookup, named = books.ledger.lookup, []
    monkeypatch.setattr(books.ledger, "lookup", lambda name, *a, **k: (named.append(name), lookup(name, *a, **k))[1])
    waiting = request_of(range(17))
    waiting.request_id = "waits"
    assert [side.matched_tokens(waiting, 0) for _ in range(3)] == [0, 0, 0]
    assert named == ["waits"]
    first = request_of(range(17))
    side.matched_tokens(first, 0)
    side.orders(output_of(first, 0, 17, [[1, 2, 3]]))
    side.finished(first)
    (order,) = side.orders(idle()).stores
    work, _ = side._open.pop(order.number)
    books.complete(work, {0: [True, True]})
    assert side.matched_tokens(waiting, 0) == 16
    assert named == ["waits", "r"]
    assert side.matched_tokens(waiting, 8) == 8, "vLLM holds more by now"
    assert named == ["waits", "r", "waits"]
    side.reset()
    assert [side.matched_tokens(waiting, 8) for _ in range(2)] == [0, 0]
    assert named == ["waits", "r", "waits", "waits"], "named anew, as what it would store is new"
    side.allocated(waiting, ([4, 5, 6],), 0)
    output = output_of(waiting, 0, 17, [[4, 5, 6]])
    output.scheduled_new_reqs[0].req_id, output.num_scheduled_tokens = "waits", {"waits": 17}
    side.orders(output)
    waiting.num_preemptions += 1
    (order,) = side.orders(idle()).stores
    assert order.plan.moves[0].num_chunks == 2
    side.heard(Report(outcomes=[Outcome(order.number, {0: np.array([True, True])})]))
    assert side.matched_tokens(waiting, 8) == 8
    assert named == ["waits", "r", "waits", "waits", "waits"], "named anew, as it was admitted since"


@pytest.mark.parametrize(
    "change",
    [
        {"lora_request": SimpleNamespace(lora_name="other")},
        {"cache_salt": "mine"},
        {"mm_features": ("image",)},
        {"prompt_embeds": object()},
        {"resumable": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_tokens_of_other_meaning_are_no_hit(change):
    """Where vLLM's hashes are too coarse, and tokens name the chunks."""
    side, request = restorable()
    assert side.matched_tokens(request, 0) == 16
    other = request_of(range(17), **change)
    other.request_id = "other"
    assert side.matched_tokens(other, 0) == 0


def test_a_session_that_took_tokens_back_is_named_anew():
    """vLLM's hashes of a streaming session may change; what is known of it then is not extended."""
    books = Recorded()
    side = SchedulerSide(OPTIONS, model="m", keys=RequestKeys(8), resume_multiple=8, drafts=False, books=books)
    request = request_of(range(16), block_hashes=[bytes([1]) * 32, bytes([2]) * 32])
    side.matched_tokens(request, 0)
    side.orders(output_of(request, 0, 16, [[1, 2]]))
    request.block_hashes = [bytes([1]) * 32, bytes([3]) * 32]
    side.orders(idle())
    assert (
        books.ledger.request("r").hashes
        == books.ledger.new_request(None, hashes=request.block_hashes, num_tokens=16, salt=b"").hashes
    )


def test_no_more_tokens_are_named_than_vllm_has_hashes_for():
    """With asynchronous scheduling hashes may lag behind the tokens."""
    keys = RequestKeys(8)
    request = request_of(range(40), block_hashes=[bytes([i]) * 32 for i in range(2)])
    assert keys.num_tokens(request) == 23
    assert len(keys.whole(request)["hashes"]) == 2
    assert keys.whole(request)["num_tokens"] == 23


def test_a_session_with_fewer_tokens_is_named_anew():
    books = Recorded()
    side = side_of(books)
    request = request_of(range(16))
    side.matched_tokens(request, 0)
    side.orders(output_of(request, 0, 16, [[1, 2]]))
    request.all_token_ids, request.num_tokens = list(range(8)), 8
    side.orders(idle())
    assert books.stored == [8]
    assert books.ledger.request("r").num_tokens == 8

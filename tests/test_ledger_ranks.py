"""Ranks with other chunks resume at one position, which all of them can restore."""

from kvjax import FullAttention, Recurrent, Restorable
from tests.oracles.layouts import cut, group
from tests.support.ledgers import engine, prompt

HYBRID = cut(group("full", FullAttention(), 4), group("state", Recurrent(), 4))


def rank(*stops: int):
    """A rank that was served prompts of these lengths, and so has states at their ends."""
    served = engine(HYBRID)
    for n, stop in enumerate(stops):
        served.served(n, prompt(stop + 1))
    return served.ledger


def test_the_hit_is_one_that_every_rank_can_restore():
    one, two = rank(8, 24), rank(8, 16)
    tokens = prompt(40)
    alone = [ledger.lookup("alone", tokens).hit_tokens for ledger in (one, two)]
    assert alone == [24, 16]  # neither has a state where the other resumes: a minimum would read what is not there
    sent = [ledger.restorable(tokens).to_bytes() for ledger in (one, two)]
    sets = [Restorable.from_bytes(data) for data in sent]
    assert [ledger.lookup("a", tokens, ranks=sets).hit_tokens for ledger in (one, two)] == [8, 8]
    assert all(len(data) < 16 for data in sent)


def test_asking_touches_and_registers_nothing():
    ledger = rank(8)
    before = (ledger.num_requests, ledger.counts.lookups, ledger.pool.counts)
    assert 8 in ledger.restorable(prompt(20))
    assert 8 not in ledger.restorable(prompt(20), salt="another")
    assert (ledger.num_requests, ledger.counts.lookups, ledger.pool.counts) == before

"""A recount of all that the pool believes."""

from collections.abc import Iterable

import numpy as np

from kvjax.pool.books import Books
from kvjax.pool.chunks import NO_SLOTS
from kvjax.pool.records import Pins, Reservation


def check_books(books: Books, reservations: Iterable[Reservation], pins: Iterable[Pins]) -> None:
    """Recounts everything.

    Raises:
        AssertionError: the books contradict each other.
    """
    chunks = books.chunks
    chunks.check_integrity()
    live = np.flatnonzero(chunks.epoch)
    indexed = live[chunks.indexed[live]]
    by_key = dict(zip(chunks.key[indexed].tolist(), indexed.tolist(), strict=True))
    assert len(by_key) == len(indexed), "a key leads to one chunk"
    assert dict(books.index.items()) == by_key, "the index has what is indexed"
    assert len(books.index) == len(by_key), "the index knows how many keys it has"
    assert np.flatnonzero(chunks.indexed).tolist() == indexed.tolist(), "a free slot is in no index"
    assert np.sort(books.policy.slots()).tolist() == indexed.tolist(), "the policy orders what keys lead to"
    _check_use(books, live, reservations, pins)
    _check_counts(books, live, indexed)


def _check_use(books: Books, live: np.ndarray, reservations: Iterable[Reservation], pins: Iterable[Pins]) -> None:
    chunks = books.chunks
    writing = np.concatenate([NO_SLOTS, *(reservation.slots for reservation in reservations)])
    assert np.sort(writing).tolist() == np.flatnonzero(chunks.writing).tolist(), "what is written is reserved"
    counted = np.zeros(len(chunks.pins), np.int64)
    for held in pins:
        np.add.at(counted, held.slots, 1)
        assert (chunks.epoch[held.slots] == held.epochs).all(), "what is read stays where it is"
    assert np.array_equal(counted, chunks.pins), "every pin belongs to one holder"
    in_use = chunks.indexed[live] | chunks.writing[live] | (chunks.pins[live] > 0)
    assert in_use.all(), "what is out of use gave its units back"


def _check_counts(books: Books, live: np.ndarray, indexed: np.ndarray) -> None:
    chunks, namespaces = books.chunks, books.namespaces
    fresh = indexed[~books.past(indexed)]
    assert books.num_stale == len(indexed) - len(fresh), "what was invalidated and not cleared away is counted"
    tables = (namespaces.existing, live), (namespaces.held, fresh), (namespaces.resident, fresh[~chunks.writing[fresh]])
    for table, slots in tables:
        recounted = np.zeros_like(table)
        np.add.at(recounted, (chunks.namespace[slots], chunks.group_idx[slots]), 1)
        assert np.array_equal(recounted, table), "every namespace knows its chunks"
    namespaces.check_integrity()

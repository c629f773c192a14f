"""What tests of faults and threads ask of a `ServingEngine` again and again."""

import numpy as np

from tests.support.faults import FaultyTransport, no_faults
from tests.support.ledgers import clear_away
from tests.support.serving_engine import Served, ServingEngine


def serve(engine: ServingEngine, name: str, tokens: np.ndarray, *, step: int = 64, salt: bytes = b"") -> int:
    """A whole request, every job waited for. Returns its hit, whose bytes were compared."""
    request = Served(name, tokens, salt)
    hit = engine.look_up(request).hit_tokens
    engine.loaded(request, engine.offloader.wait(engine.load(request)))
    while request.written < len(tokens):
        engine.compute(request, request.written + step)
        engine.offloader.wait(engine.store(request))
    end(engine, request)
    return hit


def end(engine: ServingEngine, request: Served) -> None:
    """The request finishes and gives its blocks back."""
    engine.offloader.finish(request.request_id)
    engine.drop_blocks(request)


def restored(engine: ServingEngine, tokens: np.ndarray) -> int:
    """How much of a prompt, followed by another token, comes back; its bytes are compared, and nothing is stored."""
    request = Served("what comes back", np.append(tokens, -1))
    engine.look_up(request)
    result = engine.offloader.wait(engine.load(request))
    engine.loaded(request, result)
    assert result.ok
    end(engine, request)
    return result.valid_tokens or 0


def check_nothing_is_left(engine: ServingEngine, faulty: FaultyTransport) -> None:
    """Ends what hangs; then no job, pin, reservation, unit or block is left, and every byte is what it must be."""
    faulty.choose = no_faults
    faulty.release()
    offloader, pool = engine.offloader, engine.offloader.ledger.pool
    offloader.wait()
    for job in offloader._jobs.unsettled():  # what was given up goes on
        job.transfer.settle()
    offloader.see_ended()
    offloader.check_integrity()
    stats = offloader.stats()
    assert (stats.open_requests, stats.open_jobs, stats.given_up_jobs) == (0, 0, 0)
    assert (pool.open_pins(), pool.open_reservations()) == (set(), set())
    engine.check_caches()
    engine.check_blocks([])
    offloader.invalidate()
    clear_away(pool)
    offloader.check_integrity()
    assert pool.num_free_units == pool.num_units
    assert pool.namespaces.in_use == 0
    assert faulty.violations == []

"""Books with lower tiers: a request waits once for what a tier has of it."""

from types import SimpleNamespace

import pytest

from kvjax.serving.vllm.tiered import TieredBooks


class Offloader:
    """What `TieredBooks` asks of one; a promotion has a result when the test says so."""

    def __init__(self):
        self.job = SimpleNamespace(result=None)
        self.polls = 0
        self.finished = []

    def lookup(self, request_id, **arguments):
        assert arguments["wait_s"] == 0
        return SimpleNamespace(hit_tokens=16 if self.job is None or self.job.result else 0)

    def promotion(self, request_id):
        return self.job

    def poll(self):
        self.polls += 1

    def prepare_load(self, request_id, tables):
        return type("Load", (), {"request_id": request_id, "num_chunks": 0})()

    def issued(self, request_id, operation, work, transfer):
        return SimpleNamespace(result=None)

    def finish(self, request_id):
        self.finished.append(request_id)


@pytest.fixture
def books():
    return TieredBooks(Offloader())


def test_a_request_waits_for_what_is_on_its_way(books):
    assert books.lookup("r", num_tokens=17) is None
    assert books.lookup("r", num_tokens=17) is None
    assert books._offloader.polls == 1, "seen to end by asking"
    books._offloader.job.result = SimpleNamespace(ok=True)
    assert books.lookup("r", num_tokens=17).hit_tokens == 16


def test_a_request_that_waited_once_takes_what_there_is(books):
    """A second promotion may follow the first; tokens are computed meanwhile."""
    assert books.lookup("r", num_tokens=17) is None
    books._offloader.job.result = SimpleNamespace(ok=False)
    books._offloader.poll = lambda: setattr(books._offloader, "job", SimpleNamespace(result=None))
    assert books.lookup("r", num_tokens=17).hit_tokens == 0


def test_a_request_that_is_finished_and_comes_again_waits_anew(books):
    assert books.lookup("r", num_tokens=17) is None
    books.finish("r")
    assert books._offloader.finished == ["r"]
    books._offloader.job = None
    assert books.lookup("r", num_tokens=17).hit_tokens == 16, "nothing of the old one is awaited"
    books._offloader.job = SimpleNamespace(result=None)
    assert books.lookup("r", num_tokens=17) is None


def test_a_request_that_was_restored_and_preempted_waits_anew(books):
    """What it had may have left the host pool since, and be in a tier alone."""
    assert books.lookup("r", num_tokens=17) is None
    books._offloader.job.result = SimpleNamespace(ok=True)
    assert books.lookup("r", num_tokens=17).hit_tokens == 16
    books.prepare_load("r", {})
    books._offloader.job = SimpleNamespace(result=None)
    assert books.lookup("r", num_tokens=17) is None

"""The tier on an S3-compatible server, as it is and as it goes wrong."""

import itertools
import time

import pytest

from kvjax.tiers import TierError, TierTimeoutError, TierUnavailableError, open_tier
from kvjax.tiers.kvstore import KVStoreTier
from kvjax.tiers.object_store import ObjectStore
from kvjax.tiers.store import store_failure
from tests.support.entries import LONG_S, entry, later
from tests.support.s3_server import BUCKET, SECRET, S3Server
from tests.tiers.conformance import TierConformance, delete, exists, get, put, result

numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def credentials():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "kvjax-tests")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield


@pytest.fixture(scope="module")
def shared():
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def server():
    """A server that a test may harm."""
    server = S3Server()
    yield server
    server.kill()


def tier_on(server: S3Server, path: str = "of-a-test/", **settings) -> KVStoreTier:
    spec = {"driver": "s3", "bucket": BUCKET, "path": path, "endpoint": server.endpoint, "aws_region": "us-east-1"}
    return KVStoreTier(ObjectStore(f"s3://{BUCKET}/{path}", spec), **{"max_bytes": 2**30, "retry_s": 0.05, **settings})


class TestS3Tier(TierConformance):
    machine_examples = 8

    @pytest.fixture
    def make(self, shared):
        return lambda: open_tier(shared.url(f"t{next(numbers)}/"))

    @pytest.fixture(autouse=True)
    def server_of_this(self, shared):
        self.server = shared

    def reopen(self, tier):
        tier.close()
        return open_tier(self.server.url(tier.name.split("/", 3)[3]))


def test_objects_that_are_no_entries_are_left_alone_and_not_counted(shared):
    shared.plant("mixed/notes.txt", b"mine")
    shared.plant("mixed/kvjax-1/notes.txt", b"mine")
    tier, one = tier_on(shared, "mixed/"), entry(1)
    put(tier, [one])
    tier.refresh()
    assert list(tier.list()) == [one.name]
    assert (tier.usage().num_entries, tier.usage().num_bytes) == (1, len(one.frame))
    tier.close()


def test_what_another_process_wrote_is_read_and_not_written_again(shared):
    first, second = tier_on(shared, "two/"), tier_on(shared, "two/")
    one, two = entry(1), entry(2)
    assert put(first, [one, two]) == [True, True]
    assert put(second, [one]) == [False]
    assert get(second, two.name) == two.frame
    assert exists(second, [one.name, two.name]) == [True, True]
    assert delete(first, [two.name]) == 1
    with pytest.raises(KeyError):
        get(second, two.name)
    assert exists(second, [one.name, two.name]) == [True, False]
    for tier in (first, second):
        tier.check_integrity()
        tier.close()


def test_the_budget_holds_across_a_restart(shared):
    entries = [entry(seed, 10_000) for seed in range(6)]
    budget = 4 * len(entries[0].frame)
    tier = tier_on(shared, "budget/", max_bytes=budget)
    put(tier, entries[:4])
    tier.close()
    tier = tier_on(shared, "budget/", max_bytes=budget)
    assert tier.usage().num_bytes == budget
    assert put(tier, entries[4:]) == [True, True]
    assert len(list(tier.list())) == 4
    assert exists(tier, [one.name for one in entries[4:]]) == [True, True]
    tier.close()
    tier = tier_on(shared, "budget/", max_bytes=budget // 2)
    assert len(list(tier.list())) == 2
    tier.close()


def test_a_server_that_is_down_at_the_start_is_looked_through_once_it_is_up(server):
    one = entry(1)
    tier = tier_on(server)
    put(tier, [one])
    tier.close()
    server.kill()
    tier = tier_on(server)
    with pytest.raises(TierUnavailableError):
        put(tier, [entry(2)])
    with pytest.raises(TierUnavailableError):
        get(tier, one.name)
    with pytest.raises(TierUnavailableError):
        exists(tier, [one.name])
    with pytest.raises(TierUnavailableError):
        tier.usage()
    server.start()
    until(lambda: exists_or_none(tier, one) == [False])
    assert put(tier, [one]) == [True]
    assert get(tier, one.name) == one.frame
    tier.close()


def test_a_server_that_is_killed_in_the_middle_costs_misses_until_it_is_back(server):
    tier, entries = tier_on(server), [entry(seed) for seed in range(4)]
    put(tier, entries[:2])
    server.kill()
    for call in (
        lambda: put(tier, entries[2:]),
        lambda: get(tier, entries[0].name),
        lambda: delete(tier, [entries[0].name]),
        lambda: list(tier.list()),
        tier.refresh,
    ):
        with pytest.raises(TierUnavailableError) as told:
            call()
        assert SECRET not in str(told.value)
    tier.check_integrity()
    assert exists(tier, [entries[0].name]) == [True]
    server.start()
    with pytest.raises(KeyError):
        get(tier, entries[1].name)
    assert put(tier, entries[2:]) == [True, True]
    assert get(tier, entries[2].name) == entries[2].frame
    tier.check_integrity()
    tier.close()


def test_a_server_that_hangs_holds_nobody_up_and_touches_no_buffer_later(server):
    tier = tier_on(server, num_threads=2, timeout_s=0.2)
    entries = [entry(seed, 50_000) for seed in range(6)]
    put(tier, entries[:1])
    server.stop()
    soon = time.monotonic() + 0.2
    buffer = memoryview(bytearray(entries[0].name.num_bytes))
    frames = [bytearray(one.frame) for one in entries[1:]]
    reads = tier.get([entries[0].name] * 5, [buffer] * 5, deadline=soon)
    writes = tier.put([one.name for one in entries[1:]], [memoryview(one) for one in frames], deadline=soon)
    for future in [*reads, *writes]:
        with pytest.raises(TierTimeoutError):
            result(future)
    for frame in frames:
        frame[:] = bytes(len(frame))
    with pytest.raises(TierError):
        list(tier.list())
    server.go_on()
    until(lambda: answers(tier, entries[0]))
    assert not any(buffer)
    for one in entries[1:]:
        try:
            assert get(tier, one.name) == one.frame
        except KeyError:
            assert put(tier, [one]) == [True]
    tier.check_integrity()
    tier.close()


def test_a_tier_whose_server_hangs_is_closed_in_time(server):
    tier, one = tier_on(server, timeout_s=0.1), entry(1)
    server.stop()
    (future,) = tier.put([one.name], [memoryview(one.frame)], deadline=later())
    tier.close()
    with pytest.raises(TierUnavailableError, match="closed"):
        result(future)
    server.go_on()


def test_a_server_that_hangs_at_the_start_holds_nobody_up(server):
    server.stop()
    tier = tier_on(server, timeout_s=0.1)
    with pytest.raises(TierUnavailableError, match="still being looked through"):
        put(tier, [entry(1)])
    server.go_on()
    until(lambda: exists_or_none(tier, entry(1)) is not None)
    assert put(tier, [entry(1)]) == [True]
    tier.close()


def test_a_bucket_that_is_not_there_is_unavailable(shared):
    spec = {"driver": "s3", "bucket": "no-such-bucket", "endpoint": shared.endpoint, "aws_region": "us-east-1"}
    tier = KVStoreTier(ObjectStore("s3://no-such-bucket/", spec), max_bytes=2**30)
    with pytest.raises(TierUnavailableError, match=r"s3://no-such-bucket/: there is no such bucket \(NOT_FOUND\)"):
        put(tier, [entry(1)])
    tier.close()


def until(true) -> None:
    """Waits until `true()`; fails where that takes for ever."""
    limit = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def answers(tier, one) -> bool:
    try:
        return get(tier, one.name) == one.frame
    except TierError:
        return False


def exists_or_none(tier, one):
    try:
        return exists(tier, [one.name])
    except TierUnavailableError:
        return None


def test_servers_that_are_down_leave_no_thread_of_the_process_stuck(server):
    """TensorStore asked each for its region; after two that were down, nothing in the process got an answer."""
    for port in (1, 2, 3, 4):
        down = open_tier(f"s3://{BUCKET}/x/?endpoint=http://127.0.0.1:{port}&timeout_s=60")
        with pytest.raises(TierUnavailableError):
            down.usage()
        down.close()
    tier = open_tier(f"s3://{BUCKET}/x/?endpoint={server.endpoint}")
    assert tier.usage().num_entries == 0
    tier.close()


def test_a_bucket_without_credentials_is_refused(monkeypatch):
    """Requests without them failed, and each left a thread of the process stuck, until no request got an answer."""
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(
        ValueError, match="'s3://bucket/' cannot be used: the environment must have AWS_SECRET_ACCESS_KEY"
    ):
        open_tier("s3://bucket/")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://bucket/a/?endpoint=http://no-such-host.invalid:1", r"the host name is not known \(ABORTED\)"),
        ("s3://bucket/a/?endpoint=http://127.0.0.1:1", r"the connection is refused \(ABORTED\)"),
        ("s3://no-bucket/a/?endpoint={endpoint}", r"there is no such bucket \(NOT_FOUND\)"),
    ],
)
def test_it_is_told_why_a_server_cannot_be_used(shared, url, reason):
    tier = open_tier(url.format(endpoint=shared.endpoint) + "&timeout_s=60")
    with pytest.raises(TierUnavailableError, match=f"^s3://[a-z-]*/a/: {reason}$"):
        tier.usage()
    tier.close()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "PERMISSION_DENIED: x [http_response_code='403']",
            "access is refused: see the credentials (PERMISSION_DENIED)",
        ),
        ("ABORTED: y [curl_code='60']", "its certificate is not trusted (ABORTED)"),
        ("ABORTED: y [curl_code='999']", "ABORTED"),
        ("INTERNAL: UNMISTAKABLE", "INTERNAL"),
        (f"NOT_FOUND: {SECRET} [http_response_code='404']", "NOT_FOUND"),
    ],
)
def test_of_what_a_server_says_only_known_words_are_told(text, told):
    assert str(store_failure("s3://b/", ValueError(text))) == f"s3://b/: {told}"

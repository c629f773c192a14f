"""A Redis server that is down, dies, hangs, or says anything: misses, never a hang, never a secret told."""

import logging
import threading
import time
import traceback
import tracemalloc
from concurrent.futures import Future, wait

import pytest
import redis

from kvjax.tiers import TierError, TierTimeoutError, TierUnavailableError
from kvjax.tiers.redis import open_redis
from kvjax.tiers.redis_connect import reason_of
from tests.support import hostile_server as hostile
from tests.support.entries import LONG_S, entry, later
from tests.support.hostile_server import hostile_server
from tests.support.redis_server import NEEDS_REDIS, free_port, redis_server
from tests.tiers.conformance import Guarded, delete, exists, get, put, result

SECRET = "UNMISTAKABLE"
SOON_S = 0.3
ONE = entry(1, 100_000)
ENDS = (TierTimeoutError, TierUnavailableError)


@pytest.fixture
def server():
    with redis_server() as running:
        yield running


def start_all(tier, deadline: float) -> tuple[list[Future], Guarded]:
    """One operation of each kind."""
    guarded = Guarded(ONE.name.num_bytes)
    futures: list[Future] = [
        *tier.put([ONE.name], [memoryview(ONE.frame)], deadline=deadline),
        *tier.get([ONE.name], [guarded.buffer], deadline=deadline),
        tier.exists([ONE.name], deadline=deadline),
        tier.delete([ONE.name], deadline=deadline),
    ]
    return futures, guarded


def errors_of(futures: list[Future]) -> list[BaseException | None]:
    assert not wait(futures, LONG_S).not_done
    return [future.exception() for future in futures]


@NEEDS_REDIS
def test_a_server_that_is_down_at_start_is_used_once_it_is_there(server):
    server.kill()
    tier = open_redis(server.url())
    futures, _ = start_all(tier, later())
    assert {type(error) for error in errors_of(futures)} == {TierUnavailableError}
    for call in (tier.usage, lambda: list(tier.list())):
        with pytest.raises(TierUnavailableError, match="cannot be reached"):
            call()
    server.start()
    assert put(tier, [ONE]) == [True]
    assert get(tier, ONE.name) == ONE.frame
    tier.close()


@NEEDS_REDIS
@pytest.mark.parametrize("num_done", [0, 1, 7, 20])
def test_a_server_killed_in_the_middle_leaves_whole_entries_or_none(server, num_done):
    tier = open_redis(server.url())
    entries = [entry(seed, 700_000) for seed in range(40)]
    frames = [memoryview(one.frame) for one in entries]
    puts = tier.put([one.name for one in entries], frames, deadline=later())
    guarded = [Guarded(one.name.num_bytes) for one in entries]
    gets = tier.get([one.name for one in entries], [one.buffer for one in guarded], deadline=later())
    wait(puts[:num_done], LONG_S)
    server.kill()
    for future in puts:
        assert future.exception(LONG_S) is None or isinstance(future.exception(), ENDS)
    for one, future, buffer in zip(entries, gets, guarded, strict=True):
        error = future.exception(LONG_S)
        assert isinstance(error, (KeyError, *ENDS)) or (error is None and buffer.read() == one.frame)
    server.start()
    assert exists(tier, [one.name for one in entries]) == [False] * 40
    assert put(tier, entries[:1]) == [True]
    tier.close()


@NEEDS_REDIS
def test_a_frozen_server_ends_nothing_late_and_is_used_once_it_goes_on(server):
    tier = open_redis(server.url("connections=1"))
    put(tier, [ONE])
    server.freeze()
    futures, guarded = start_all(tier, time.monotonic() + SOON_S)
    assert {type(error) for error in errors_of(futures)} == {TierTimeoutError}
    server.thaw()
    put(tier, [ONE])
    assert get(tier, ONE.name) == ONE.frame
    assert guarded.untouched()
    tier.close()


@NEEDS_REDIS
def test_what_queues_behind_something_that_hangs_ends_by_its_own_deadline(server):
    tier = open_redis(server.url("connections=1"))
    put(tier, [entry(2)])
    server.freeze()
    first = tier.exists([ONE.name], deadline=later())
    futures, guarded = start_all(tier, time.monotonic() + SOON_S)
    assert {type(error) for error in errors_of(futures)} == {TierTimeoutError}
    assert not first.done()
    server.thaw()
    assert result(first).tolist() == [False]
    assert exists(tier, [ONE.name, entry(2).name]) == [False, True]
    assert guarded.untouched()
    tier.close()


@NEEDS_REDIS
def test_what_waits_for_a_frozen_server_can_be_cancelled(server):
    tier = open_redis(server.url("connections=1"))
    put(tier, [ONE])
    server.freeze()
    hanging = tier.exists([ONE.name], deadline=later())
    futures, guarded = start_all(tier, later())
    assert [future.cancel() for future in futures] == [True] * 4
    server.thaw()
    assert result(hanging).tolist() == [True]
    assert get(tier, ONE.name) == ONE.frame
    assert guarded.untouched()
    tier.close()


def test_a_get_under_way_can_be_cancelled_until_its_bytes_come():
    asked, may_answer = threading.Event(), threading.Event()
    entries = [ONE, entry(2)]

    def speak(connection, ended):
        hostile.shake_hands(connection)
        asked.set()
        may_answer.wait()
        for one in entries:
            connection.sendall(b":%d\r\n$%d\r\n%s\r\n:1\r\n" % (len(one.frame), len(one.frame), one.frame))
        ended.wait()

    with hostile_server(speak) as port:
        tier = open_redis(f"redis://127.0.0.1:{port}")
        guarded = [Guarded(one.name.num_bytes) for one in entries]
        names, buffers = [one.name for one in entries], [one.buffer for one in guarded]
        futures = tier.get(names, buffers, deadline=later())
        assert asked.wait(LONG_S)
        assert futures[0].cancel()
        may_answer.set()
        assert result(futures[1]) == entries[1].name.num_bytes
        assert guarded[1].read() == entries[1].frame
        assert guarded[0].untouched()
        tier.close()


@NEEDS_REDIS
def test_a_tier_closes_in_time_though_the_server_hangs(server):
    tier = open_redis(server.url(f"connections=2&timeout_s={SOON_S}"))
    put(tier, [ONE, entry(2, 2**20)])
    server.freeze()
    big = [entry(seed, 4 * 2**20) for seed in (11, 12, 13)]
    futures: list[Future] = list(
        tier.put([one.name for one in big], [memoryview(b.frame) for b in big], deadline=later())
    )
    more, guarded = start_all(tier, later())
    tier.close()
    assert all(future.done() for future in [*futures, *more])
    assert all(isinstance(error, TierError) for error in errors_of([*futures, *more]))
    assert guarded.untouched()
    server.thaw()
    again = open_redis(server.url())
    for one, there in zip(big, exists(again, [one.name for one in big]), strict=True):
        assert not there or get(again, one.name) == one.frame
    again.close()


@NEEDS_REDIS
def test_idle_connections_that_the_server_closed_are_made_anew_unseen(server):
    tier = open_redis(server.url())
    put(tier, [ONE])
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
        assert get(tier, ONE.name) == ONE.frame
        client.client_kill_filter(_type="normal", skipme=True)
        assert put(tier, [entry(2)]) == [True]
    server.kill()
    server.start()
    with pytest.raises(KeyError):
        get(tier, ONE.name)
    assert put(tier, [ONE]) == [True]
    tier.close()


def told(error: BaseException | None) -> str:
    """All that anyone may see of an error."""
    text = ""
    while error is not None:
        text += "".join(traceback.format_exception(error)) + repr(error) + str(error) + repr(vars(error))
        error = error.__cause__ or error.__context__
    return text


@NEEDS_REDIS
@pytest.mark.parametrize("credentials", [f":{SECRET}", f"{SECRET}:{SECRET}", f"default:{SECRET}"])
def test_wrong_credentials_are_refused_and_told_nowhere(caplog, credentials):
    caplog.set_level(logging.DEBUG)
    with redis_server(config=["--requirepass", "right"]) as guarded_server:
        tier = open_redis(guarded_server.url(credentials=credentials))
        futures, _ = start_all(tier, later())
        for error in errors_of(futures):
            assert isinstance(error, TierUnavailableError)
            assert "refuses the user or the password" in str(error)
            assert SECRET not in told(error)
        assert SECRET not in f"{tier} {tier!r} {tier.name} {vars(tier)}"
        tier.close()
        nobody = open_redis(guarded_server.url())
        with pytest.raises(TierUnavailableError, match=r"asks for a password, and none is given \(NOAUTH\)"):
            exists(nobody, [ONE.name])
        nobody.close()
        right = open_redis(guarded_server.url(credentials=":right"))
        assert put(right, [ONE]) == [True]
        right.close()
    assert SECRET not in caplog.text


@pytest.mark.parametrize("speak", [hostile.echoes_in_errors, hostile.hangs_up])
def test_a_server_that_repeats_what_it_is_told_makes_nothing_known(caplog, speak):
    caplog.set_level(logging.DEBUG)
    with hostile_server(speak) as port:
        tier = open_redis(f"redis://{SECRET}:{SECRET}@127.0.0.1:{port}")
        futures, _ = start_all(tier, later())
        for error in errors_of(futures):
            assert isinstance(error, TierUnavailableError)
            assert SECRET not in told(error)
        with pytest.raises(TierUnavailableError) as caught:
            tier.usage()
        assert SECRET not in told(caught.value)
        tier.close()
    assert SECRET not in caplog.text


@pytest.mark.parametrize("start", [b"-", b":5\r\n-", b":5\r\n$1\r\nx\r\n-"])
def test_errors_of_commands_are_not_repeated(start):
    with hostile_server(hostile.answers(start + f"{SECRET} {SECRET}\r\n".encode())) as port:
        tier = open_redis(f"redis://127.0.0.1:{port}?timeout_s={SOON_S}")
        guarded = Guarded(ONE.name.num_bytes)
        (future,) = tier.get([ONE.name], [guarded.buffer], deadline=time.monotonic() + SOON_S)
        assert SECRET not in told(future.exception(LONG_S))
        with pytest.raises(TierError) as caught:
            tier.usage()
        assert SECRET not in told(caught.value)
        tier.close()


def test_nobody_there_makes_nothing_known():
    tier = open_redis(f"redis://{SECRET}:{SECRET}@127.0.0.1:{free_port()}")
    futures, _ = start_all(tier, later())
    for error in errors_of(futures):
        assert isinstance(error, TierUnavailableError)
        assert SECRET not in told(error)
    tier.close()


X = b"x" * 65536
HOSTILE = {
    "says nothing": hostile.says_nothing,
    "hangs up": hostile.hangs_up,
    "greets with garbage": hostile.says_at_once(bytes(range(256)) * 4096),
    "greets with HTTP": hostile.says_at_once(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "greets without an end": hostile.says_at_once(b"+", X),
    "greets with lists in lists": hostile.says_at_once(b"*1\r\n" * 12_000),
    "greets with a huge list": hostile.says_at_once(b"*999999999999\r\n" + b":1\r\n" * 100_000),
    "answers with garbage": hostile.answers(bytes(range(256)) * 64),
    "says nothing after the handshake": hostile.answers(b""),
    "claims a huge text": hostile.answers(b"$9999999999\r\n", X),
    "claims a huge chunk": hostile.answers(b":9999999999\r\n$9999999999\r\n", X),
    "claims a negative length": hostile.answers(b":5\r\n$-5\r\n", X),
    "claims a huge number": hostile.answers(b":" + b"9" * 5000 + b"\r\n", X),
    "claims a huge list": hostile.answers(b"*9999999999\r\n", b":1\r\n" * 4096),
    "nests lists": hostile.answers(b"", b"*1\r\n" * 4096),
    "ends no line": hostile.answers(b"+", X),
    "ends a chunk wrongly": hostile.answers(b":100128\r\n$5\r\nabcdefgh\r\n:1\r\n"),
    "drips": hostile.drips(b":100128\r\n$100128\r\n"),
    "answers an integer with a text": hostile.answers(b"$1\r\nx\r\n" * 100),
}


@pytest.mark.parametrize("operation", ["put", "get", "exists", "delete", "usage", "list"])
@pytest.mark.parametrize("speak", HOSTILE.values(), ids=HOSTILE.keys())
def test_whatever_a_server_says_is_a_miss_in_time_and_in_little_memory(speak, operation):
    with hostile_server(speak) as port:
        tier = open_redis(f"redis://127.0.0.1:{port}?timeout_s={SOON_S}")
        deadline = time.monotonic() + SOON_S
        guarded = Guarded(ONE.name.num_bytes)
        calls = {
            "put": lambda: result(tier.put([ONE.name], [memoryview(ONE.frame)], deadline=deadline)[0]),
            "get": lambda: result(tier.get([ONE.name], [guarded.buffer], deadline=deadline)[0]),
            "exists": lambda: result(tier.exists([ONE.name], deadline=deadline)),
            "delete": lambda: result(tier.delete([ONE.name], deadline=deadline)),
            "usage": tier.usage,
            "list": lambda: list(tier.list()),
        }
        tracemalloc.start()
        with pytest.raises(ENDS):
            calls[operation]()
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 8 * 2**20
        guarded.read()
        tier.close()


@pytest.mark.parametrize(
    "said",
    ["greets without an end", "claims a huge text", "claims a huge list", "nests lists", "ends no line"],
)
def test_a_reply_without_an_end_is_given_up_without_waiting_for_the_deadline(said):
    with hostile_server(HOSTILE[said]) as port:
        tier = open_redis(f"redis://127.0.0.1:{port}?timeout_s={LONG_S}")
        for call in (tier.usage, lambda: list(tier.list())):
            with pytest.raises(TierUnavailableError):
                call()
        tier.close()


@NEEDS_REDIS
def test_an_entry_that_another_client_makes_huge_is_read_no_further_than_its_buffer(server):
    tier = open_redis(server.url())
    put(tier, [ONE])
    with server.client() as client:
        client.setrange(ONE.name.text, 400 * 2**20, "x")
        guarded = Guarded(ONE.name.num_bytes)
        tracemalloc.start()
        (future,) = tier.get([ONE.name], [guarded.buffer], deadline=later())
        assert result(future) == 400 * 2**20 + 1
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert guarded.read() == ONE.frame
    assert peak_bytes < 2**20
    assert delete(tier, [ONE.name]) == 1
    tier.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"redis://{SECRET}:{SECRET}@no-such-host.invalid:1/0", "its host name is not known"),
        (f"redis://:{SECRET}@127.0.0.1:{{free}}/0", "the connection is refused"),
        ("redis+unix:///no/such/socket", "No such file or directory"),
    ],
)
def test_it_is_told_why_a_server_cannot_be_reached(url, reason):
    tier = open_redis(url.format(free=free_port()))
    with pytest.raises(TierUnavailableError, match=f" cannot be reached: {reason}$") as caught:
        tier.usage()
    assert SECRET not in told(caught.value)
    tier.close()


@NEEDS_REDIS
def test_it_is_told_why_a_server_refuses():
    with redis_server(config=["--maxclients", "1", "--databases", "2"]) as small:
        tier = open_redis(small.url().replace("/0", "/2"))
        with pytest.raises(TierUnavailableError, match=r"/2 refuses the database$"):
            tier.usage()
        tier.close()
        with small.client() as other:
            other.ping()
            tier = open_redis(small.url())
            with pytest.raises(TierUnavailableError, match=r"/0 refuses: it has as many clients as it takes$"):
                tier.usage()
            tier.close()


def test_what_is_no_redis_server_is_told():
    error = redis.InvalidResponse(f"Protocol Error: {SECRET}")
    assert reason_of(error) == "cannot be reached, or is no Redis server"

"""A tier on a real Redis server."""

import subprocess
import sys
import threading
from concurrent.futures import wait

import pytest

from kvjax.tiers import TierError, TierFullError, TierUnavailableError
from kvjax.tiers.redis import open_redis
from tests.support.entries import LONG_S, Entry, entry, later, name_of
from tests.support.redis_server import NEEDS_OPENSSL, NEEDS_REDIS, redis_server
from tests.tiers.conformance import Guarded, TierConformance, delete, exists, get, get_all, put, result

pytestmark = NEEDS_REDIS


@pytest.fixture(scope="module")
def server():
    with redis_server() as running:
        yield running


@pytest.fixture
def client(server):
    with server.client() as made:
        made.flushall()
        yield made


@pytest.fixture
def tier(server, client):
    made = open_redis(server.url())
    yield made
    made.close()


class RedisConformance(TierConformance):
    query = ""

    @pytest.fixture
    def make(self, listening):
        def make():
            with listening.client() as client:
                client.flushall()
            return open_redis(listening.url(self.query))

        self.listening = listening
        return make

    def reopen(self, tier):
        tier.close()
        return open_redis(self.listening.url(self.query))


@pytest.fixture(scope="module")
def unix_server():
    with redis_server(unix=True) as running:
        yield running


@pytest.fixture(scope="module")
def tls_server():
    with redis_server(tls=True, config=["--tls-auth-clients", "no"]) as running:
        yield running


@pytest.fixture(scope="module")
def evicting_server():
    with redis_server(config=["--maxmemory", "40mb", "--maxmemory-policy", "allkeys-lru"]) as running:
        yield running


class TestOverTcp(RedisConformance):
    @pytest.fixture
    def listening(self, server):
        return server


class TestOverUnixSocketWithTimeToLive(RedisConformance):
    query = "ttl_s=600&connections=4&max_bytes=1GiB"

    @pytest.fixture
    def listening(self, unix_server):
        return unix_server


@NEEDS_OPENSSL
class TestOverTls(RedisConformance):
    @pytest.fixture
    def listening(self, tls_server):
        self.query = f"tls_ca={tls_server.folder}/ca.pem"
        return tls_server


class TestWhileTheServerEvicts(RedisConformance):
    """A server that has room for little drops entries at will."""

    @pytest.fixture
    def listening(self, evicting_server):
        return evicting_server


def test_entries_are_texts_under_their_names(tier, client):
    one = entry(1)
    put(tier, [one])
    assert client.keys() == [one.name.text.encode()]
    assert client.get(one.name.text) == one.frame
    assert client.ttl(one.name.text) == -1


def test_an_entry_that_is_there_is_not_written_again(tier, client):
    one = entry(1)
    put(tier, [one])
    assert put(tier, [Entry(one.name, entry(2).frame)]) == [False]
    assert client.get(one.name.text) == one.frame


def test_a_time_to_live_begins_anew_with_each_use(server, client):
    one, tier = entry(1), open_redis(server.url("ttl_s=1000"))
    put(tier, [one])
    assert 999 <= client.ttl(one.name.text) <= 1000
    for use in (lambda: get(tier, one.name), lambda: put(tier, [one])):
        client.expire(one.name.text, 5)
        use()
        assert client.ttl(one.name.text) > 900
    client.pexpire(one.name.text, 0)
    assert exists(tier, [one.name]) == [False]
    tier.close()


@pytest.mark.parametrize("spoil", ["list", "empty"])
def test_a_value_that_is_no_entry_tells_0_bytes_and_can_be_deleted(tier, client, spoil):
    one, good = entry(1), entry(2)
    if spoil == "list":
        client.rpush(one.name.text, "x")
    else:
        client.set(one.name.text, "")
    put(tier, [good])
    assert put(tier, [one]) == [False]
    assert exists(tier, [one.name]) == [True]
    guarded = [Guarded(1128), Guarded(1128)]
    futures = tier.get([one.name, good.name], [buffer.buffer for buffer in guarded], deadline=later())
    assert [result(future) for future in futures] == [0, 1128]
    assert guarded[1].read() == good.frame
    assert guarded[0].untouched()
    assert delete(tier, [one.name]) == 1
    assert put(tier, [one]) == [True]


def test_names_of_others_are_passed_over(tier, client):
    one = entry(1)
    put(tier, [one])
    for text in ["other", "kvjax-1/x", f"{one.name.text}x", "kvjax-1/\udcff".encode(errors="surrogateescape")]:
        client.set(text, "x")
    assert list(tier.list()) == [one.name]


def test_many_entries_are_listed_found_and_deleted(tier, client):
    names = [name_of(seed, 10) for seed in range(3000)]
    client.mset({name.text: "x" for name in names})
    assert sorted(tier.list()) == sorted(names)
    assert exists(tier, [*names, name_of(9999, 10)]) == [True] * 3000 + [False]
    assert delete(tier, [*names, name_of(9999, 10)]) == 3000
    assert client.dbsize() == 0


def test_usage_is_that_of_the_server(server, tier, client):
    before = tier.usage().num_bytes
    put(tier, [entry(seed, 2**20) for seed in range(4)])
    usage = tier.usage()
    assert usage.num_entries is None
    assert usage.num_bytes >= before + 2**22
    assert usage.max_bytes is None
    client.config_set("maxmemory", 10**9)
    try:
        assert tier.usage().max_bytes == 10**9
    finally:
        client.config_set("maxmemory", 0)


def test_a_limit_of_our_own_refuses_what_does_not_fit(server, client):
    limit = client.info("memory")["used_memory"] + 5 * 2**20
    tier = open_redis(server.url(f"max_bytes={limit}&connections=1"))
    assert tier.usage().max_bytes == limit
    entries = [entry(seed, 2**20) for seed in range(8)]
    futures = tier.put([one.name for one in entries], [memoryview(one.frame) for one in entries], deadline=later())
    wait(futures, LONG_S)
    written = [future.exception() is None for future in futures]
    assert written[0]
    assert not written[-1]
    assert client.info("memory")["used_memory"] <= limit + 2**20
    with pytest.raises(TierFullError, match=f"`max_bytes` = {limit}"):
        put(tier, entries[-1:])
    assert exists(tier, [one.name for one in entries]) == written
    tier.close()


def test_a_server_at_its_limit_is_full_and_gives_what_it_has():
    with redis_server(config=["--maxmemory", "8mb", "--maxmemory-policy", "noeviction"]) as small:
        tier = open_redis(small.url())
        entries = [entry(seed, 2**20) for seed in range(12)]
        futures = tier.put([one.name for one in entries], [memoryview(one.frame) for one in entries], deadline=later())
        wait(futures, LONG_S)
        kept = [one for one, future in zip(entries, futures, strict=True) if future.exception() is None]
        assert 0 < len(kept) < 12
        with pytest.raises(TierFullError, match="memory limit"):
            put(tier, [entry(99, 2**20)])
        assert get_all(tier, [one.name for one in kept]) == [one.frame for one in kept]
        assert delete(tier, [one.name for one in kept]) == len(kept)
        assert put(tier, entries[-1:]) == [True]
        tier.close()


def test_a_server_that_evicts_behind_our_back_gives_right_bytes_or_none():
    with redis_server(config=["--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru"]) as small:
        tier = open_redis(small.url())
        entries = [entry(seed, 2**20) for seed in range(24)]
        put(tier, entries)
        guarded = [Guarded(one.name.num_bytes) for one in entries]
        futures = tier.get([one.name for one in entries], [one.buffer for one in guarded], deadline=later())
        wait(futures, LONG_S)
        kept = [at for at, future in enumerate(futures) if future.exception() is None]
        assert 0 < len(kept) < 24
        assert all(guarded[at].read() == entries[at].frame for at in kept)
        assert all(isinstance(future.exception(), KeyError) for at, future in enumerate(futures) if at not in kept)
        tier.close()


def test_users_have_their_rights_and_databases_are_apart(server, client):
    client.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@read", "+ping", "+select"])
    writer, reader = open_redis(server.url()), open_redis(server.url(credentials="reader:pw"))
    elsewhere = open_redis(server.url().replace("/0", "/3"))
    one = entry(1)
    put(writer, [one])
    assert get(reader, one.name) == one.frame
    assert exists(elsewhere, [one.name]) == [False]
    for refused in (lambda: put(reader, [entry(2)]), lambda: delete(reader, [one.name]), reader.usage):
        with pytest.raises(TierUnavailableError, match=r"does not let the user do so \(NOPERM\)"):
            refused()
    assert get(reader, one.name) == one.frame
    for tier in (writer, reader, elsewhere):
        tier.close()


@NEEDS_OPENSSL
def test_tls_is_checked_both_ways():
    with redis_server(tls=True, config=["--tls-auth-clients", "yes"]) as secure:
        folder, one = secure.folder, entry(1)
        ours = f"tls_ca={folder}/ca.pem&tls_cert={folder}/client.pem&tls_key={folder}/client.key"
        good = open_redis(secure.url(ours))
        assert put(good, [one]) == [True]
        good.close()
        unchecked = open_redis(secure.url(ours.replace("tls_ca", "tls_verify=false&tls_ca")))
        assert get(unchecked, one.name) == one.frame
        unchecked.close()
        for query in (f"tls_ca={folder}/ca.pem", ours.removeprefix(f"tls_ca={folder}/ca.pem&")):
            stranger = open_redis(secure.url(query))
            with pytest.raises(TierUnavailableError):
                exists(stranger, [one.name])
            stranger.close()
        stranger = open_redis(secure.url())
        with pytest.raises(TierUnavailableError, match=r" cannot be reached: its certificate is not trusted$"):
            exists(stranger, [one.name])
        stranger.close()


@NEEDS_OPENSSL
def test_a_certificate_of_another_host_is_refused():
    with redis_server(tls=True, config=["--tls-auth-clients", "no"]) as secure:
        with secure.client() as client:
            client.config_set(
                "tls-cert-file", f"{secure.folder}/other.pem", "tls-key-file", f"{secure.folder}/other.key"
            )
        tier = open_redis(secure.url(f"tls_ca={secure.folder}/ca.pem"))
        with pytest.raises(TierUnavailableError):
            exists(tier, [entry(1).name])
        tier.close()


OTHER_PROCESS = """
import sys
from kvjax.tiers.redis import open_redis
from tests.support.entries import entry
from tests.tiers.conformance import get, put
tier = open_redis(sys.argv[1])
assert get(tier, entry(1, 300_000).name) == entry(1, 300_000).frame
assert put(tier, [entry(1, 300_000), entry(2, 300_000)]) == [False, True]
tier.close()
"""


def test_two_processes_share_entries(server, tier):
    put(tier, [entry(1, 300_000)])
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, server.url()], check=True)
    assert get(tier, entry(2, 300_000).name) == entry(2, 300_000).frame


def test_a_closed_tier_leaves_no_connection_and_no_thread(server, client):
    before = set(threading.enumerate())
    tier = open_redis(server.url("connections=3"))
    put(tier, [entry(seed, 2**20) for seed in range(6)])
    assert len(client.client_list()) > 1
    assert any(thread.name.startswith("kvjax-redis_") for thread in set(threading.enumerate()) - before)
    tier.close()
    after = set(threading.enumerate()) - before
    assert not any(thread.name.startswith("kvjax-redis_") and thread.is_alive() for thread in after)
    with pytest.raises(TierError, match="closed"):
        exists(tier, [entry(1).name])

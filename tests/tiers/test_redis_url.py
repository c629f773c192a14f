"""URLs of Redis servers are read exactly, and what is in them stays there."""

import pytest

from kvjax.tiers.redis import open_redis
from kvjax.tiers.redis_url import RedisAddress, Tls, parse_redis_url

SECRET = "UNMISTAKABLE"


def address(url: str, **environ: str) -> RedisAddress:
    return parse_redis_url(url, environ)[0]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost", RedisAddress("localhost")),
        ("redis://h:1234/5", RedisAddress("h", 1234, db=5)),
        ("redis://h:1/", RedisAddress("h", 1)),
        ("redis://:p%40%2F@h", RedisAddress("h", password="p@/")),
        ("redis://u%3A:p@[::1]:7", RedisAddress("::1", 7, username="u:", password="p")),
        ("rediss://h", RedisAddress("h", tls=Tls())),
        ("rediss://h?tls_verify=false", RedisAddress("h", tls=Tls(verify=False))),
        ("redis+unix:///a/b%20c.sock", RedisAddress(socket_path="/a/b c.sock")),
        ("redis+unix://u:p@/a?db=2", RedisAddress(socket_path="/a", db=2, username="u", password="p")),
    ],
)
def test_addresses_are_read(url, expected):
    assert address(url) == expected


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://u:p@localhost?ttl_s=5", "redis://localhost:6379/0"),
        ("rediss://:p@[::1]:7/3", "rediss://[::1]:7/3"),
        ("redis+unix://:p@/a/b.sock", "redis+unix:///a/b.sock"),
        ("redis+unix:///a?db=4", "redis+unix:///a?db=4"),
    ],
)
def test_the_name_of_a_tier_is_its_address_without_credentials(url, text):
    assert address(url).text == text
    tier = open_redis(url)
    assert tier.name == text
    tier.close()


def test_files_of_tls_are_read(tmp_path):
    files = {name: tmp_path / name for name in ("ca", "cert", "key")}
    for file in files.values():
        file.touch()
    query = "&".join(f"tls_{name}={file}" for name, file in files.items())
    assert address(f"rediss://h?{query}").tls == Tls(*(str(file) for file in files.values()))


def test_credentials_come_from_the_environment_where_the_url_has_none():
    environ = {"KVJAX_REDIS_USERNAME": "eu", "KVJAX_REDIS_PASSWORD": "ep"}
    one = address("redis://h", **environ)
    assert (one.username, one.password) == ("eu", "ep")
    one = address("redis://u:p@h", **environ)
    assert (one.username, one.password) == ("u", "p")
    one = address("redis://u@h", **environ)
    assert (one.username, one.password) == ("u", "ep")


def test_the_environment_of_the_process_is_read_once_the_tier_is_opened(monkeypatch):
    monkeypatch.setenv("KVJAX_REDIS_PASSWORD", SECRET)
    assert parse_redis_url("redis://h")[0].password == SECRET


def test_options_become_those_of_the_tier():
    tier = open_redis(
        "redis://h?ttl_s=1.5&connections=3&write=back&timeout_s=0.25&max_pending_bytes=1MiB&max_bytes=2GiB"
    )
    assert (tier.ttl_s, tier.connections, tier.write, tier.timeout_s) == (1.5, 3, "back", 0.25)
    assert (tier.max_pending_bytes, tier.max_bytes) == (2**20, 2**31)
    tier.close()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (b"redis://h", "must be a string, got a bytes"),
        ("", "must begin with redis://, rediss://, redis\\+unix://"),
        ("http://h", "must begin with redis://"),
        ("redis:h", "must begin with redis://"),
        ("redis://", "must name a host"),
        ("redis://:6379", "must name a host"),
        ("redis://h:0", "a port from 1 to 65535"),
        ("redis://h:65536", "a port from 1 to 65535"),
        ("redis://h:x", "a port from 1 to 65535"),
        ("redis://[h", "host cannot be read"),
        ("redis://h/x", "`db` in `url` must be a whole number, got 'x'"),
        ("redis://h/-1", "`db` in `url` must be a whole number, got '-1'"),
        ("redis://h?db=1", "`db` in `url` must stand after the host"),
        ("redis://u@h", "must have a password beside the user"),
        ("redis://h#f", "percent-encoded"),
        ("redis+unix://h/a", "must be redis\\+unix:///path/to/socket"),
        ("redis+unix://", "must be redis\\+unix:///path/to/socket"),
        ("redis://h?bogus=1", "options in `url` must be of .*, got 'bogus'"),
        ("redis://h?TTL=1", "options in `url` must be of .*, got something else"),
        ("redis://h?ttl_s=1&ttl_s=2", "`ttl_s` in `url` must be given once, got it twice"),
        ("redis://h?ttl_s=0", "`ttl_s` in `url` must be a number of seconds of at least 0.001, got '0'"),
        ("redis://h?ttl_s=nan", "`ttl_s` in `url` must be a number of seconds .*, got 'nan'"),
        ("redis://h?timeout_s=", "`timeout_s` in `url` must be a number of seconds .*, got ''"),
        ("redis://h?connections=0", "`connections` must be a positive int, got 0"),
        ("redis://h?connections=65", "`connections` must be below 65, got 65"),
        ("redis://h?connections=2.0", "`connections` in `url` must be a whole number, got '2.0'"),
        ("redis://h?write=both", "`write` must be one of 'through', 'back', 'never', got 'both'"),
        ("redis://h?max_bytes=1GB", "`max_bytes` in `url` must be a positive size such as 10GiB, got '1GB'"),
        ("redis://h?max_pending_bytes=0", "`max_pending_bytes` in `url` must be a positive size .*, got '0'"),
        ("redis://h?tls_verify=false", "`tls_verify` in `url` must go with rediss://, got redis://"),
        ("rediss://h?tls_verify=no", "`tls_verify` in `url` must be true or false, got 'no'"),
        ("rediss://h?tls_ca=/nowhere", "`tls_ca` in `url` must be a file that is there, got '/nowhere'"),
        ("rediss://h?tls_key=/dev/null", "`tls_key` in `url` must be a file that is there"),
    ],
)
def test_bad_urls_are_refused(url, error, monkeypatch):
    monkeypatch.delenv("KVJAX_REDIS_PASSWORD", raising=False)
    with pytest.raises(ValueError, match=error):
        open_redis(url)


def test_a_key_without_a_certificate_is_refused(tmp_path):
    (tmp_path / "key").touch()
    with pytest.raises(ValueError, match="`tls_key` in `url` must go with `tls_cert`, got it alone"):
        open_redis(f"rediss://h?tls_key={tmp_path}/key")


@pytest.mark.parametrize(
    "url",
    [
        f"http://:{SECRET}@h",
        f"redis://:{SECRET}@",
        f"redis://:{SECRET}@h:99999",
        f"redis://:{SECRET}@h:x",
        f"redis://:x/{SECRET}@h",
        f"redis://:x?{SECRET}@h",
        f"redis://:x?{SECRET}=1@h",
        f"redis://:x?ttl_s={SECRET}@h",
        f"redis://:x#{SECRET}@h",
        f"redis://:[{SECRET}@h",
        f"redis://:{SECRET}:x",
        f"redis://:{SECRET}\u2100@h",
        f"redis://:{SECRET}@h/x",
        f"redis://:{SECRET}@h?bogus=1",
        f"redis://:{SECRET}@h?ttl_s=x",
        f"redis+unix://:{SECRET}@h/a",
        f"rediss://:{SECRET}@h?tls_ca=/nowhere",
        f"redis://:{SECRET}@h".encode(),
    ],
)
def test_errors_of_urls_repeat_no_secret(url):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the texts are looked at above
        open_redis(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in f"{error!s} {error!r}"
        error = error.__cause__ or error.__context__

"""URLs of tiers: what is taken, and what is refused in one sentence that tells no secret."""

import sys

import pytest

from kvjax.tiers import open_tier

SECRET = "hunter2"


def test_options_become_those_of_the_tier(tmp_path):
    tier = open_tier(f"file://{tmp_path}/a%20b%25?max_bytes=3MiB&write=back&timeout_s=1.5&max_pending_bytes=7")
    assert tier.name == f"file://{tmp_path}/a b%"
    assert (tmp_path / "a b%").is_dir()
    assert tier.usage().max_bytes == 3 * 2**20
    assert (tier.write, tier.timeout_s, tier.max_pending_bytes) == ("back", 1.5, 7)
    tier.close()


def test_defaults_are_those_that_are_told(tmp_path):
    tier = open_tier(f"file://{tmp_path}/")
    assert (tier.name, tier.write, tier.usage().max_bytes) == (f"file://{tmp_path}", "through", 100 * 2**30)
    tier.close()


@pytest.mark.parametrize("url", ["gs://bucket/of/mine/?max_bytes=1GiB&write=never&timeout_s=0.01"])
def test_a_google_store_is_accepted(url, monkeypatch):
    monkeypatch.setattr("kvjax.tiers.kvstore.FirstScan.start", lambda *_: None)
    tier = open_tier(url)
    assert tier.name == "gs://bucket/of/mine/"
    tier.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (7, "`url` must be a non-empty string"),
        ("", "`url` must be a non-empty string"),
        ("/var/kv", "a plain path: write file://"),
        ("./kv", "a plain path: write file://"),
        ("kv", "got no URL"),
        (f"ftp://u:{SECRET}@host/", r"got ftp://…"),
        (f"{SECRET * 9}://host/", "got another"),
        ("file://kv/x", "absolute path"),
        ("file://", "absolute path"),
        ("file:///a/../b", r"without `.`, `..`"),
        ("file:///a/%2e%2e/b", r"without `.`, `..`"),
        ("file:///a/./b", r"without `.`, `..`"),
        ("file:///a%00b", "control characters"),
        ("file:///a%0ab", "control characters"),
        ("file:///a\nb", "control characters"),
        ("file:///a\tb", "control characters"),
        ("file:///a%ff", "UTF-8"),
        ("file:///a#b", "no fragment"),
        ("file:///a#", "no fragment"),
        ("file:///a?colour=red", "must be one of max_bytes, write, timeout_s, max_pending_bytes, got 'colour'"),
        (f"s3://bucket/a?{SECRET}=x", "got another"),
        ("file:///a?endpoint=http://x", "got 'endpoint'"),
        ("file:///a?write", "name=value"),
        ("file:///a?write=back&write=back", "`write` must be given once"),
        ("file:///a?max_bytes=1GB", "`max_bytes` must be digits"),
        ("file:///a?max_bytes=-1", "`max_bytes` must be digits"),
        ("file:///a?max_bytes=0", "`max_bytes` must be a positive int"),
        ("file:///a?max_bytes=", "`max_bytes` must be digits"),
        ("file:///a?timeout_s=soon", "`timeout_s` must be a positive number"),
        ("file:///a?timeout_s=0", "`timeout_s` must be a positive number"),
        ("file:///a?timeout_s=nan", "`timeout_s` must be a positive number"),
        ("file:///a?write=sideways", "`write` must be one of"),
        ("file:///a?max_pending_bytes=0", "`max_pending_bytes` must be a positive int"),
        ("s3://", "must name a bucket"),
        ("s3:///a", "must name a bucket"),
        ("s3://BUCKET/a", "must name a bucket"),
        (f"s3://key:{SECRET}/a", "must name a bucket"),
        (f"s3://key:{SECRET}@bucket/a", "hold no credentials"),
        (f"s3://[{SECRET}/a", "its host is none"),
        ("s3://bucket/a/../b", r"without `.`, `..`"),
        (f"s3://bucket/a?endpoint=http://u:{SECRET}@host", "`endpoint` must be http://host:port"),
        ("s3://bucket/a?endpoint=host:9000", "`endpoint` must be http://host:port"),
        ("s3://bucket/a?endpoint=http://host/path", "`endpoint` must be http://host:port"),
        ("s3://bucket/a?region=Here!", "`region` must be"),
    ],
)
def test_anything_else_is_refused_by_name(url, told, tmp_path, monkeypatch):
    if isinstance(url, str) and url.startswith("file:///a"):
        url = url.replace("file:///a", f"file://{tmp_path}/a", 1)
    with pytest.raises(ValueError, match=told) as refused:
        open_tier(url)
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("file:///a", "tensorstore", r"kvjax\[tiers\]"), ("redis://host", "redis", r"kvjax\[redis\]")],
)
def test_a_missing_package_is_named_with_the_extra_to_install(url, module, extra, monkeypatch):
    for loaded in [name for name in sys.modules if name.startswith("kvjax.tiers.")]:
        if loaded.rpartition(".")[2] not in ("tier", "entries", "urls", "frame"):
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"pip install '{extra}'"):
        open_tier(url)

"""`kvjax tier` on real files, good ones and hostile ones."""

import io
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash

from kvjax.tiers import open_tier
from kvjax.tiers.entries import MOST_ENTRY_BYTES, EntryName
from kvjax.tiers.frame import HEADER_BYTES, write_header
from tests.cli.command import document, kvjax, refusal
from tests.support.entries import NAMESPACE, OTHER_NAMESPACE, Entry, entry, later
from tests.support.redis_server import NEEDS_REDIS, free_port, redis_server

READ_ONLY = ("usage", "inspect", "verify")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tier's folder; its path has what a URL must escape."""
    return tmp_path / "a tier"


def url_of(folder: Path) -> str:
    return f"file://{folder}".replace(" ", "%20")


def stored(folder: Path, entries: Sequence[Entry]) -> list[Path]:
    """Writes entries as an offloader would, and returns their files."""
    tier = open_tier(url_of(folder))
    futures = tier.put([e.name for e in entries], [memoryview(e.frame) for e in entries], deadline=later())
    assert all(future.result() for future in futures)
    tier.close()
    return [folder / e.name.text for e in entries]


def placed(folder: Path, name: EntryName, content: bytes) -> Path:
    """Writes any bytes under the name of an entry."""
    path = folder / name.text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with its bytes and the time of its last change."""
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*")}


def spoilt(good: bytes, how: str) -> bytes:
    """The frame of an entry after something happened to it."""
    if how == "checksum":
        return good[:-1] + bytes([good[-1] ^ 1])
    if how == "header":
        return good[:20] + bytes([good[20] ^ 1]) + good[21:]
    if how == "magic":
        return b"ZIPX" + good[4:]
    if how == "version":
        head = good[:4] + struct.pack("<H", 2) + good[6:120]
        return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + good[HEADER_BYTES:]
    if how == "namespace":
        return entry(50, len(good) - HEADER_BYTES, namespace=OTHER_NAMESPACE).frame
    if how == "key":
        return entry(50, len(good) - HEADER_BYTES).frame
    return {"cut": good[:-1], "longer": good + b"x", "empty": b"", "stub": good[:50]}[how]


def test_usage_counts_by_namespace_and_group(folder: Path):
    stored(folder, [entry(1), entry(2, 200), entry(3, group_idx=1), entry(4, namespace=OTHER_NAMESPACE)])
    found = document("tier", "usage", url_of(folder) + "?max_bytes=1MiB")
    assert [tuple(row.values()) for row in found["groups"]] == [
        (NAMESPACE.hex(), 0, 2, 1000 + 200 + 2 * HEADER_BYTES),
        (NAMESPACE.hex(), 1, 1, 1000 + HEADER_BYTES),
        (OTHER_NAMESPACE.hex(), 0, 1, 1000 + HEADER_BYTES),
    ]
    assert (found["num_entries"], found["max_bytes"]) == (4, 2**20)
    assert found["entry_bytes"] == found["used_bytes"] == 3200 + 4 * HEADER_BYTES
    assert NAMESPACE.hex() in kvjax("tier", "usage", url_of(folder)).out


def test_inspect_tells_what_headers_say(folder: Path):
    one, other = entry(1), entry(2, namespace=OTHER_NAMESPACE, group_idx=3)
    stored(folder, [one, other])
    found = document("tier", "inspect", url_of(folder))
    assert found["num_entries"] == 2
    assert found["entries"][1] == {
        "name": other.name.text,
        "namespace": OTHER_NAMESPACE.hex(),
        "group_idx": 3,
        "group": "global",
        "chunk_idx": 3,
        "tokens": [48, 64],
        "num_bytes": 1000 + HEADER_BYTES,
        "ok": None,
        "problem": None,
    }
    verified = document("tier", "inspect", url_of(folder), one.name.text, "--verify")
    assert [(row["name"], row["ok"]) for row in verified["entries"]] == [(one.name.text, True)]
    of_one = document("tier", "inspect", url_of(folder), "--namespace", NAMESPACE.hex())
    assert [row["name"] for row in of_one["entries"]] == [one.name.text]


def test_inspect_shows_no_more_than_asked_for(folder: Path):
    stored(folder, [entry(i) for i in range(5)])
    found = document("tier", "inspect", url_of(folder), "--limit", 2)
    assert (found["num_entries"], len(found["entries"])) == (5, 2)
    assert "2 of 5 entries" in kvjax("tier", "inspect", url_of(folder), "--limit", 2).out


def test_inspect_reads_a_file_wherever_it_lies(folder: Path, tmp_path: Path):
    one = entry(1, 3 * 2**20)
    (path,) = stored(folder, [one])
    moved = tmp_path / "moved"
    moved.write_bytes(one.frame)
    for file in (path, moved):
        (row,) = document("tier", "inspect", file, "--verify")["entries"]
        assert (row["name"], row["tokens"], row["ok"]) == (one.name.text, [48, 64], True)


@pytest.mark.parametrize(
    ("how", "problem"),
    [("checksum", "checksum"), ("version", "version"), ("cut", "length"), ("namespace", "name"), ("stub", "length")],
)
def test_inspect_of_a_bad_file_says_what_is_wrong(folder: Path, how: str, problem: str):
    one = entry(1)
    path = placed(folder, one.name, spoilt(one.frame, how))
    ran = kvjax("tier", "inspect", path, "--verify")
    assert ran.code == 1
    assert problem in ran.out
    assert one.name.text in ran.out


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("checksum", "checksum"),
        ("header", "header"),
        ("magic", "magic"),
        ("version", "version"),
        ("namespace", "namespace"),
        ("key", "key"),
        ("cut", "length"),
        ("longer", "length"),
        ("empty", "length"),
        ("stub", "length"),
    ],
)
def test_verify_finds_and_deletes_bad_entries_alone(folder: Path, how: str, reason: str):
    good, other = entry(1), entry(2)
    (kept,) = stored(folder, [good])
    path = placed(folder, other.name, spoilt(other.frame, how))
    found = kvjax("tier", "verify", url_of(folder), "--json")
    assert found.code == 1
    assert f'"num_good": 1, "good_bytes": 1128, "num_bad": 1, "bad_by_reason": {{"{reason}": 1}}' in found.out
    assert path.exists()
    assert kvjax("tier", "verify", url_of(folder), "--delete").code == 1
    assert (kept.exists(), path.exists()) == (True, False)
    assert document("tier", "verify", url_of(folder))["num_good"] == 1


def test_verify_of_a_namespace_reads_nothing_else(folder: Path):
    stored(folder, [entry(1)])
    bad = entry(2, namespace=OTHER_NAMESPACE)
    placed(folder, bad.name, spoilt(bad.frame, "checksum"))
    assert document("tier", "verify", url_of(folder), "--namespace", NAMESPACE.hex())["num_good"] == 1
    assert kvjax("tier", "verify", url_of(folder), "--namespace", OTHER_NAMESPACE.hex()).code == 1


def test_entries_of_huge_claims_take_no_memory(folder: Path):
    """One claims a tebibyte and has 10 bytes; one has it, as a file with a hole."""
    small, large = (EntryName(NAMESPACE, entry(seed).name.key, MOST_ENTRY_BYTES) for seed in (1, 2))
    placed(folder, small, b"KVJX" + b"\0" * 6)
    header = bytearray(entry(2).frame[:HEADER_BYTES])
    with placed(folder, large, bytes(header)).open("r+b") as file:
        file.truncate(MOST_ENTRY_BYTES)
    ran = kvjax("tier", "verify", url_of(folder), "--json", "--delete")
    assert ran.code == 1
    assert '"num_bad": 2, "bad_by_reason": {"length": 2}' in ran.out


def test_entries_too_large_to_read_are_told_and_kept(folder: Path):
    (path,) = stored(folder, [entry(1, 5000)])
    ran = kvjax("tier", "verify", url_of(folder), "--max-entry-bytes", "4KiB", "--delete", "--json")
    assert ran.code == 1
    assert '"num_unread": 1, "unread_by_reason": {"larger than 4096 B": 1}, "num_deleted": 0' in ran.out
    assert path.exists()


def test_what_is_no_entry_is_left_alone(folder: Path):
    stored(folder, [entry(1)])
    ours = folder / "kvjax-1" / NAMESPACE.hex()
    strangers = [folder / "notes.txt", ours / "README", ours / "0-1128" / "zz" / "abc", folder / "kvjax-1" / "%2e%2e"]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not ours")
    pipe = folder / entry(2).name.text
    pipe.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)
    assert document("tier", "verify", url_of(folder))["num_entries"] == 1
    document("tier", "gc", url_of(folder), "--max-bytes", 0)
    assert document("tier", "clear", url_of(folder), "--yes")["num_deleted"] == 0
    assert all(path.read_text() == "not ours" for path in strangers)
    assert pipe.exists()


def test_what_a_header_says_cannot_steer_the_terminal(folder: Path):
    one = entry(1)
    frame = bytearray(one.frame)
    write_header(memoryview(frame), one.name, group_name="\x1b[2J\n", chunk_idx=3, tokens_per_chunk=16)
    placed(folder, one.name, bytes(frame))
    ran = kvjax("tier", "inspect", url_of(folder))
    assert ran.code == 0
    assert "\x1b" not in ran.out


@pytest.mark.parametrize("action", READ_ONLY)
def test_looking_changes_nothing(folder: Path, action: str):
    """An offloader that opened the folder would delete all but the good entry."""
    good, cut = entry(1), entry(2)
    (path,) = stored(folder, [good])
    placed(folder, cut.name, cut.frame[:-1])
    (path.parent / f"{path.name}.__lock").write_bytes(b"half")
    os.utime(path, (1, 1))
    before = everything(folder)
    kvjax("tier", action, url_of(folder) + "?write=back&max_bytes=1KiB")
    assert everything(folder) == before


@pytest.mark.parametrize("action", [*READ_ONLY, "gc", "clear"])
def test_no_folder_is_made(tmp_path: Path, action: str):
    ran = kvjax("tier", action, f"file://{tmp_path}/none", *(["--yes"] if action == "clear" else []))
    assert (ran.code, ran.out) == (2, "")
    assert "must be a folder" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_gc_clears_up_and_evicts_what_was_used_longest_ago(folder: Path):
    entries = [entry(i) for i in range(4)]
    paths = stored(folder, entries)
    for path, used in zip(paths, (300, 100, 400, 200), strict=True):
        os.utime(path, (used, used))
    cut = entry(9)
    wrong = placed(folder, cut.name, cut.frame[:-1])
    stray = paths[0].parent / f"{paths[0].name}.__lock"
    stray.write_bytes(b"half")
    before = everything(folder)
    budget = 2 * entries[0].name.num_bytes
    told = document("tier", "gc", f"{url_of(folder)}?max_bytes={budget}", "--dry-run")
    assert everything(folder) == before
    done = document("tier", "gc", url_of(folder), "--max-bytes", budget)
    assert [path.exists() for path in [*paths, wrong, stray]] == [True, False, True, False, False, False]
    assert (told["num_swept"], done["num_swept"]) == (None, 1)
    for key in ("num_wrong", "num_evicted", "evicted_bytes", "num_left", "left_bytes"):
        assert told[key] == done[key]
    assert (done["num_wrong"], done["num_evicted"], done["num_left"], done["left_bytes"]) == (1, 2, 2, budget)


def test_gc_of_a_namespace_looks_at_no_other(folder: Path):
    entries = [entry(1), entry(2, namespace=OTHER_NAMESPACE)]
    paths = stored(folder, entries)
    document("tier", "gc", url_of(folder), "--max-bytes", 0, "--namespace", NAMESPACE.hex())
    assert [path.exists() for path in paths] == [False, True]


def test_clear_deletes_a_namespace_or_all(folder: Path):
    paths = stored(folder, [entry(1), entry(2), entry(3, namespace=OTHER_NAMESPACE)])
    one = document("tier", "clear", url_of(folder), "--yes", "--namespace", NAMESPACE.hex())
    assert (one["num_deleted"], one["namespace"]) == (2, NAMESPACE.hex())
    assert [path.exists() for path in paths] == [False, False, True]
    assert "deleted       1 of" in kvjax("tier", "clear", url_of(folder), "--yes").out
    assert not any(path.exists() for path in paths)


class Terminal(io.StringIO):
    """What somebody types."""

    def isatty(self) -> bool:
        return True


def test_clear_removes_empty_folders_of_its_own_and_no_others(folder: Path):
    stored(folder, [entry(1), entry(2), entry(3, namespace=OTHER_NAMESPACE)])
    kept = stored(folder, [entry(4, group_idx=1)])[0]
    for theirs in ("theirs", "kvjax-1/theirs", f"kvjax-1/{NAMESPACE.hex()}/theirs", "kvjax-1/theirs/0-1/00"):
        (folder / theirs).mkdir(parents=True, exist_ok=True)
    placed(folder, entry(5, namespace=OTHER_NAMESPACE).name, b"").rename(folder / "kvjax-1" / "file")
    kept.rename(kept.with_name("no entry"))
    assert document("tier", "clear", url_of(folder), "--yes")["num_deleted"] == 3
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    ours = kept.with_name("no entry").relative_to(folder)
    ways = {way.as_posix() for way in (ours, *ours.parents) if way.name}
    theirs = {f"kvjax-1/theirs{more}" for more in ("", "/0-1", "/0-1/00")}
    assert left == {"theirs", f"kvjax-1/{NAMESPACE.hex()}/theirs", "kvjax-1/file", *theirs, *ways}


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("n\n", 2), ("", 2)])
def test_clear_asks_at_a_terminal(folder: Path, typed: str, code: int, monkeypatch: pytest.MonkeyPatch):
    (path,) = stored(folder, [entry(1)])
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    ran = kvjax("tier", "clear", url_of(folder), "--json")
    assert (ran.code, path.exists()) == (code, code == 2)
    assert "delete 1 entries (1.10 KiB)" in ran.err


def test_clear_without_a_terminal_needs_yes(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (path,) = stored(folder, [entry(1)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert refusal("tier", "clear", url_of(folder)).endswith("give --yes, or answer at a terminal")
    assert path.exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("usage", "ftp://host/x"), "`url` must be"),
        (("usage", "file:///x?write=now"), "`write` must be"),
        (("usage", "file:///x?write=back&write=back"), "once"),
        (("inspect", "redis:/user:secret@host"), "URL must be a tier's URL or a file of one entry"),
        (("inspect", "/"), "Is a directory"),
        (("inspect", "/dev/null"), "no plain file"),
        (("inspect", "{url}", "kvjax-1/../../etc"), "NAME must be"),
        (("inspect", "{url}", entry(7).name.text), "has no entry"),
        (("inspect", "{url}", "--limit", "0"), "--limit"),
        (("verify", "{url}", "--namespace", "abc"), "32 hexadecimal digits"),
        (("gc", "{url}", "--max-bytes", "-1"), "--max-bytes"),
        ((), "ACTION"),
    ],
)
def test_bad_input_is_one_line(folder: Path, argv: Sequence[str], said: str):
    stored(folder, [entry(1)])
    line = refusal("tier", *(part.format(url=url_of(folder)) for part in argv))
    assert said in line
    assert "secret" not in line


@pytest.mark.parametrize("action", ["usage", "inspect", "verify", "gc"])
def test_a_tier_that_is_down_is_one_line(action: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret-of-mine")
    line = refusal("tier", action, "s3://bucket/x/?endpoint=http://127.0.0.1:1&timeout_s=60")
    assert "s3://bucket/x/ cannot be reached" in line
    assert "secret-of-mine" not in line


@NEEDS_REDIS
def test_a_redis_server_is_looked_at_like_a_folder_and_its_password_is_not_told():
    good, bad = entry(1), entry(2, namespace=OTHER_NAMESPACE)
    with redis_server(config=["--requirepass", "secret-of-mine"]) as server:
        url = server.url(credentials=":secret-of-mine")
        with server.client(password="secret-of-mine") as client:
            client.set(good.name.text, good.frame)
            client.set(bad.name.text, spoilt(bad.frame, "cut"))
            client.set("theirs", "x")
            ran = [kvjax("tier", action, url) for action in ("usage", "inspect", "verify")]
            assert [one.code for one in ran] == [0, 0, 1]
            assert document("tier", "gc", url, "--dry-run")["num_left"] == 2
            assert kvjax("tier", "verify", url, "--delete").code == 1
            assert document("tier", "verify", url)["num_good"] == 1
            ran.append(kvjax("tier", "clear", url, "--yes"))
            assert client.keys() == [b"theirs"]
    ran.append(kvjax("tier", "usage", f"redis://:secret-of-mine@127.0.0.1:{free_port()}/0?timeout_s=1"))
    assert (ran[-1].code, ran[-1].out) == (2, "")
    assert "secret" not in repr(ran)

"""The tier on a folder: what every tier must do, and what files bring with them."""

import contextlib
import fcntl
import itertools
import os
import struct
import threading
import time

import pytest

from kvjax.tiers import TierError, TierFullError, TierTimeoutError, file_store, open_tier
from kvjax.tiers.file_store import LOCK_SUFFIX, FileStore
from kvjax.tiers.kvstore import KVStoreTier
from tests.support.entries import LONG_S, entry, later
from tests.tiers.conformance import TierConformance, delete, exists, get, put, result

ENTRIES = [entry(seed, 10_000 - 128) for seed in range(6)]
ROOM = 10_000  # of one of them


class TestFileTier(TierConformance):
    @pytest.fixture
    def make(self, tmp_path):
        numbers = itertools.count()
        return lambda: open_tier(f"file://{tmp_path}/{next(numbers)}")

    def reopen(self, tier):
        tier.close()
        return open_tier(tier.name)


class TestFileTierWithoutReadsThatNeverWait(TestFileTier):
    """As on file systems that refuse `RWF_NOWAIT`, and as if memory held nothing."""

    @pytest.fixture(autouse=True)
    def nothing_is_cached(self, monkeypatch):
        monkeypatch.setattr(file_store, "read_cached", lambda *_: 0)


@pytest.fixture
def open_(tmp_path):
    """Opens tiers on one folder, and closes them at the end."""
    with contextlib.ExitStack() as stack:

        def make(**settings) -> KVStoreTier:
            store = FileStore(f"file://{tmp_path}", str(tmp_path), writable=settings.get("write") != "never")
            tier = KVStoreTier(store, **{"max_bytes": 2**30, **settings})
            stack.callback(tier.check_integrity)
            stack.callback(tier.close)
            return tier

        yield make


def path_of(folder, one):
    return folder / one.name.text


def plant(path, data=b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_an_entry_is_a_plain_file_that_only_its_owner_reaches(open_, tmp_path):
    put(open_(), ENTRIES[:1])
    path = path_of(tmp_path, ENTRIES[0])
    assert path.read_bytes() == ENTRIES[0].frame
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
    assert (tmp_path / "kvjax-1").stat().st_mode & 0o777 == 0o700


def test_the_budget_and_the_order_of_use_outlive_the_process(open_, tmp_path):
    put(open_(max_bytes=4 * ROOM), ENTRIES[:4])
    for age, one in zip([30, 10, 40, 20], ENTRIES, strict=False):
        os.utime(path_of(tmp_path, one), (time.time() - age, time.time() - age))
    tier = open_(max_bytes=3 * ROOM)
    assert exists(tier, [one.name for one in ENTRIES[:4]]) == [True, True, False, True]
    assert not path_of(tmp_path, ENTRIES[2]).exists()
    put(tier, [ENTRIES[4]])
    assert exists(tier, [one.name for one in ENTRIES[:5]]) == [False, True, False, True, True]
    assert tier.usage().num_bytes == 3 * ROOM


@pytest.mark.parametrize(("age_s", "renewed"), [(3600, True), (1, False)])
def test_reading_renews_the_time_of_use_where_that_is_old(open_, tmp_path, age_s, renewed):
    tier = open_()
    put(tier, ENTRIES[:1])
    before = time.time() - age_s
    os.utime(path_of(tmp_path, ENTRIES[0]), (before, before))
    get(tier, ENTRIES[0].name)
    assert (path_of(tmp_path, ENTRIES[0]).stat().st_mtime > before + 0.5) == renewed


def test_files_that_are_no_entries_are_left_alone_and_not_counted(open_, tmp_path):
    put(open_(), ENTRIES[:1])
    mine = path_of(tmp_path, ENTRIES[0])
    others = [
        tmp_path / "notes.txt",
        tmp_path / f"notes.txt{LOCK_SUFFIX}",
        tmp_path / "kvjax-1" / "notes.txt",
        mine.parent / "notes.txt",
        mine.parent / mine.name.upper(),
        mine.parent / f"{mine.name}.bak",
        mine.parent / f"notes{LOCK_SUFFIX}",
        mine.parents[2] / "0-0" / "ab" / ("ab" * 16),
        tmp_path / "kvjax-2" / mine.relative_to(tmp_path / "kvjax-1"),
    ]
    for other in others:
        plant(other)
    tier = open_()
    assert tier.sweep() == 0
    assert list(tier.list()) == [ENTRIES[0].name]
    assert (tier.usage().num_entries, tier.usage().num_bytes) == (1, ROOM)
    assert all(other.exists() for other in others)


def test_entries_of_other_sizes_than_their_names_say_are_deleted_at_the_start(open_, tmp_path):
    plant(path_of(tmp_path, ENTRIES[0]), ENTRIES[0].frame[:-1])
    plant(path_of(tmp_path, ENTRIES[1]), b"")
    plant(path_of(tmp_path, ENTRIES[2]), ENTRIES[2].frame)
    tier = open_()
    assert list(tier.list()) == [ENTRIES[2].name]
    assert tier.usage().num_bytes == ROOM


@pytest.mark.parametrize("at_start", [True, False])
def test_what_killed_writers_left_is_swept_and_what_others_hold_is_not(open_, tmp_path, at_start):
    tier = None if at_start else open_()
    strays = [path_of(tmp_path, one).with_name(path_of(tmp_path, one).name + LOCK_SUFFIX) for one in ENTRIES[:3]]
    for stray in strays:
        plant(stray, b"half an en")
    with strays[1].open("r+b") as held:
        fcntl.fcntl(held, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, 0, 0, 0, 0))
        if at_start:
            tier = open_()
        assert tier is not None
        assert at_start or tier.sweep() == 2
        assert [stray.exists() for stray in strays] == [False, True, False]
    assert tier.sweep() == 1
    assert put(tier, ENTRIES[:3]) == [True] * 3
    assert not any(stray.exists() for stray in strays)


def test_where_files_cannot_be_locked_old_strays_are_swept(open_, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    tier = open_()
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    for one, age_s in zip(ENTRIES, [10, 10_000], strict=False):
        stray = path_of(tmp_path, one).with_name(path_of(tmp_path, one).name + LOCK_SUFFIX)
        plant(stray)
        os.utime(stray, (time.time() - age_s, time.time() - age_s))
    assert tier.sweep() == 1
    assert tier.sweep() == 0


def test_no_link_below_the_root_is_followed(open_, tmp_path, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    tier = open_()
    one, two, three = ENTRIES[:3]
    plant(outside / "secret", one.frame)
    path_of(tmp_path, one).parent.mkdir(parents=True)
    path_of(tmp_path, one).symlink_to(outside / "secret")
    put(tier, [two])
    os.rename(path_of(tmp_path, two).parent, outside / "moved")
    path_of(tmp_path, two).parent.symlink_to(outside / "moved")
    lock = path_of(tmp_path, three).with_name(path_of(tmp_path, three).name + LOCK_SUFFIX)
    lock.parent.mkdir(parents=True)
    lock.symlink_to(outside / "target")
    for linked in (one, two):
        with pytest.raises(KeyError):
            get(tier, linked.name)
    for linked in (one, two, three):
        with pytest.raises(TierError):
            put(tier, [linked])
    assert delete(tier, [two.name]) == 0
    assert list(tier.list()) == []
    assert tier.sweep() == 0
    open_(max_bytes=1)
    assert (outside / "secret").read_bytes() == one.frame
    assert (outside / "moved" / path_of(tmp_path, two).name).read_bytes() == two.frame
    assert not (outside / "target").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_an_entrys_place_is_a_miss_and_hangs_nobody(open_, tmp_path, make):
    tier, path = open_(), path_of(tmp_path, ENTRIES[0])
    path.parent.mkdir(parents=True)
    make(path)
    with pytest.raises(KeyError):
        get(tier, ENTRIES[0].name)
    with pytest.raises(TierError, match="something that is no file"):
        put(tier, [ENTRIES[0]])
    assert exists(open_(), [ENTRIES[0].name]) == [False]
    assert path.exists()


def test_a_root_that_vanished_is_an_error_and_is_not_made_again(open_, tmp_path):
    tier = open_()
    put(tier, ENTRIES[:1])
    os.rename(tmp_path, f"{tmp_path}-away")
    for call in (
        lambda: get(tier, ENTRIES[0].name),
        lambda: put(tier, ENTRIES[1:2]),
        lambda: delete(tier, [ENTRIES[0].name]),
        lambda: list(tier.list()),
        tier.refresh,
        tier.sweep,
    ):
        with pytest.raises(TierError, match="No such file or directory"):
            call()
    assert not tmp_path.exists()
    os.rename(f"{tmp_path}-away", tmp_path)
    assert get(tier, ENTRIES[0].name) == ENTRIES[0].frame


def test_a_root_that_is_a_link_is_that_folder(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    tier = open_tier(f"file://{tmp_path}/link")
    put(tier, ENTRIES[:1])
    assert get(tier, ENTRIES[0].name) == ENTRIES[0].frame
    tier.close()


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_root_that_is_a_file_is_refused(tmp_path, below):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"file://.*/file"):
        open_tier(f"file://{tmp_path}/file{below}")


def test_a_root_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    with pytest.raises(ValueError, match="must be a folder that may be written"):
        open_tier(f"file://{tmp_path}")
    open_tier(f"file://{tmp_path}?write=never").close()


def test_a_tier_that_is_only_read_needs_its_folder(tmp_path):
    with pytest.raises(ValueError, match="must be a folder"):
        open_tier(f"file://{tmp_path}/missing?write=never")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (28, TierFullError, "No space left on device"),
        (122, TierFullError, "Disk quota exceeded"),
        (5, TierError, "Input/output error"),
        (13, TierError, "Permission denied"),
        (30, TierError, "Read-only file system"),
    ],
)
def test_errors_of_a_disk_are_those_of_a_tier(open_, tmp_path, monkeypatch, number, kind, told):
    """TensorStore's text is as it was seen, but for the number."""

    class FailingStore:
        def write(self, *_args, **_kwargs):
            raise ValueError(f"RESOURCE_EXHAUSTED: Failed writing: \"/x\": words [os_error_code='{number}']")

    tier = open_()
    monkeypatch.setattr(tier._store, "_values", FailingStore())
    with pytest.raises(kind, match=rf"^file://{tmp_path}: {told}$"):
        put(tier, ENTRIES[:1])
    assert tier.usage().num_bytes == 0


@pytest.mark.parametrize(("number", "told"), [(5, "Input/output error"), (13, "Permission denied")])
def test_errors_of_reading_are_those_of_a_tier(open_, monkeypatch, number, told):
    def fail(*_):
        raise OSError(number, "words")

    tier = open_()
    put(tier, ENTRIES[:1])
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TierError, match=f": {told}$"):
        get(tier, ENTRIES[0].name)
    monkeypatch.undo()
    assert get(tier, ENTRIES[0].name) == ENTRIES[0].frame


def test_a_disk_that_hangs_holds_nobody_up_and_touches_no_buffer_later(open_, monkeypatch):
    """The disk answers after the deadline; what it sends then ends up nowhere."""
    tier = open_(num_threads=1)
    put(tier, ENTRIES[:2])
    read, go_on = os.preadv, threading.Event()

    def slow(file, buffers, at, flags=0):
        if flags:
            raise BlockingIOError(11, "not in memory")
        moved = read(file, buffers, at)
        assert go_on.wait(LONG_S)
        return moved

    monkeypatch.setattr(os, "preadv", slow)
    buffer = memoryview(bytearray(ROOM))
    (future,) = tier.get([ENTRIES[0].name], [buffer], deadline=later(0.05))
    with pytest.raises(TierTimeoutError):
        result(future)
    go_on.set()
    assert get(tier, ENTRIES[1].name) == ENTRIES[1].frame  # by the one thread that hung
    assert not any(buffer)


def test_an_entry_that_is_cut_while_it_is_read_tells_how_much_came(open_, monkeypatch):
    tier = open_()
    put(tier, ENTRIES[:1])
    monkeypatch.setattr(file_store, "read_cached", lambda *_: 0)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    (future,) = tier.get([ENTRIES[0].name], [memoryview(bytearray(ROOM))], deadline=later())
    assert result(future) == 0


def test_two_tiers_on_one_folder_do_no_harm_to_each_other(open_):
    first, second = open_(max_bytes=4 * ROOM), open_(max_bytes=4 * ROOM)
    assert put(first, ENTRIES[:3]) == [True] * 3
    assert put(second, ENTRIES[2:4]) == [False, True]
    assert get(second, ENTRIES[0].name) == ENTRIES[0].frame
    assert exists(second, [one.name for one in ENTRIES[:4]]) == [True, False, True, True]
    second.refresh()
    assert exists(second, [one.name for one in ENTRIES[:4]]) == [True] * 4
    assert put(second, ENTRIES[4:6]) == [True, True]
    for one in ENTRIES[:3]:
        with contextlib.suppress(KeyError):
            assert get(first, one.name) == one.frame
    first.refresh()
    assert first.usage() == second.usage()


def test_readers_see_whole_entries_or_none_while_they_are_deleted_and_written(open_):
    tier, other = open_(), open_()
    one, stop, wrong = entry(1, 400_000), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            with contextlib.suppress(KeyError):
                wrong.extend([1] if get(other, one.name) != one.frame else [])

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(60):
        put(tier, [one])
        delete(tier, [one.name])
    stop.set()
    reader.join()
    assert not wrong


@pytest.mark.parametrize("show", [True, False])
def test_looking_through_a_folder_shows_progress_where_that_is_asked_for(tmp_path, capsys, show):
    with contextlib.closing(open_tier(f"file://{tmp_path}")) as tier:
        put(tier, ENTRIES)
    with contextlib.closing(open_tier(f"file://{tmp_path}", show_progress=show)) as tier:
        assert tier.usage().num_entries == len(ENTRIES)
    told = capsys.readouterr()
    assert told.out == ""
    assert ("looking through" in told.err) == show


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_folder_that_another_removes_while_an_entry_is_written_costs_nothing(tmp_path, monkeypatch, when):
    one, other = entry(1), entry(2)
    make, open_one = FileStore._make_way, file_store.open_folder
    times = []

    def removed(path) -> None:
        while len(times) < 2 and path != tmp_path / "kvjax-1" and path.is_dir() and not list(path.iterdir()):
            path.rmdir()
            path = path.parent
        times.append(path)

    def made(store, name):
        make(store, name)
        if when == "after":
            removed((tmp_path / name.text).parent)

    def opened(part, above, make):
        if when == "before" and part == one.name.text.split("/")[-2]:
            removed((tmp_path / one.name.text).parent.parent)
        return open_one(part, above, make)

    tier = open_tier(f"file://{tmp_path}")
    put(tier, [other])
    monkeypatch.setattr(FileStore, "_make_way", made)
    monkeypatch.setattr(file_store, "open_folder", opened)
    delete(tier, [other.name])
    tier.sweep()
    assert [path.name for path in tmp_path.rglob("*")] == ["kvjax-1"]
    assert put(tier, [one]) == [True]
    assert len(times) > 1 or when == "after"
    assert get(tier, one.name) == one.frame
    assert (tmp_path / "kvjax-1").stat().st_mode & 0o777 == 0o700
    tier.close()

"""The tier on a folder, as processes are killed and disks are full for real."""

import contextlib
import os
import random
import subprocess
import sys

import pytest

from kvjax.tiers import TierError, TierFullError, open_tier
from tests.support.entries import LONG_S, entry
from tests.support.killed_writer import entries_of
from tests.tiers.conformance import delete, exists, get, put

NUM_KILLS = int(os.environ.get("KVJAX_TIER_KILLS", "5"))


def start_writer(url: str, seed: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.support.killed_writer", url, str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for_lines(writer: subprocess.Popen, num_lines: int) -> None:
    assert writer.stdout
    for _ in range(num_lines):
        assert writer.stdout.readline(), "the writer ended"


def check_what_is_left(url: str, seed: int, folder) -> None:
    """All that can be read is whole, all that is counted is there, and nothing else is left."""
    with contextlib.closing(open_tier(url)) as tier:
        entries = {one.name: one.frame for one in entries_of(seed)}
        left = list(tier.list())
        assert set(left) <= entries.keys()
        assert all(get(tier, name) == entries[name] for name in left)
        assert tier.usage().num_bytes == sum(name.num_bytes for name in left)
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert sorted(str(file.relative_to(folder)) for file in files) == sorted(name.text for name in left)
        for one in entries_of(seed)[:3]:
            put(tier, [one])
            assert get(tier, one.name) == one.frame


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_writer_that_is_killed_leaves_no_half_entry(tmp_path, seed):
    """It is killed after some of its writes have ended, in the middle of others or of deletions."""
    url = f"file://{tmp_path}"
    with start_writer(url, seed) as writer:
        wait_for_lines(writer, random.Random(seed).randrange(1, 80))
        writer.kill()
    check_what_is_left(url, seed, tmp_path)


def test_two_processes_write_and_delete_the_same_entries(tmp_path):
    url = f"file://{tmp_path}"
    with start_writer(url, 1) as first, start_writer(url, 1) as second:
        with contextlib.closing(open_tier(url)) as reader:
            for _ in range(3):
                wait_for_lines(first, 20)
                wait_for_lines(second, 20)
                for one in entries_of(1):
                    with contextlib.suppress(KeyError):
                        assert get(reader, one.name) == one.frame
        first.kill()
        second.kill()
    check_what_is_left(url, 1, tmp_path)


@pytest.fixture
def mount(tmp_path):
    """Mounts something on a folder, and unmounts it at the end."""
    with contextlib.ExitStack() as stack:

        def mounted(*options: str):
            folder = tmp_path / "mounted"
            folder.mkdir(exist_ok=True)
            done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"this user may not mount anything here: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", str(folder)], check=True, timeout=LONG_S)
            return folder

        yield mounted


def test_a_disk_that_is_really_full_drops_what_was_used_longest_ago_or_refuses(mount):
    """Of 4 MiB another's file takes half. Room is made once, of what the tier holds, and never of the other's."""
    folder = mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    (folder / "others").write_bytes(bytes(2 * 2**20))
    with contextlib.closing(open_tier(f"file://{folder}/tier")) as tier:
        entries = [entry(seed, 500_000) for seed in range(6)]
        for one in entries:
            assert put(tier, [one]) == [True]
        there = exists(tier, [one.name for one in entries])
        assert there[-1]
        assert sum(there) == 4
        for one, known in zip(entries, there, strict=True):
            if known:
                assert get(tier, one.name) == one.frame
        with pytest.raises(TierFullError, match="No space left on device"):
            put(tier, [entry(9, 3 * 2**20)])
        delete(tier, [one.name for one in entries])
        (folder / "others").write_bytes(bytes(4 * 2**20 - 200_000))
        with pytest.raises(TierFullError, match="No space left on device"):
            put(tier, entries[:1])
        assert tier.usage().num_bytes == 0
        assert not [file for file in (folder / "tier").rglob("*") if file.is_file()]
        assert (folder / "others").stat().st_size == 4 * 2**20 - 200_000
        tier.check_integrity()


def test_a_disk_that_turns_read_only_is_still_read(mount):
    folder = mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    with contextlib.closing(open_tier(f"file://{folder}")) as tier:
        put(tier, [entry(1)])
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(TierError, match="Read-only file system"):
            put(tier, [entry(2)])
        with pytest.raises(TierError, match="Read-only file system"):
            delete(tier, [entry(1).name])
        assert get(tier, entry(1).name) == entry(1).frame
        assert exists(tier, [entry(1).name, entry(2).name]) == [True, False]
        with pytest.raises(ValueError, match="may be written"):
            open_tier(f"file://{folder}")
        with contextlib.closing(open_tier(f"file://{folder}?write=never")) as again:
            assert get(again, entry(1).name) == entry(1).frame

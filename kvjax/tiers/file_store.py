"""Entries as files below a folder."""

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvjax.tiers.entries import EntryName, folder_of, is_folder, parse_name
from kvjax.tiers.files import FOLDER, nobody_holds, open_folder, read_cached, unlink_same, usable_root
from kvjax.tiers.handover import Handover
from kvjax.tiers.store import STORE_ERRORS, Found, Store, absent, contents, open_store, os_failure, store_failure
from kvjax.tiers.tier import TierError

LOCK_SUFFIX = ".__lock"  # TensorStore writes a value into a file of this name, then gives it the value's
REFRESH_S = 300.0  # of files that are read, the time of use is that old at most

# A FIFO in an entry's place must not hang whoever opens it.
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_PIECE_BYTES = 4 * 2**20
_MORE_ATTEMPTS = 3
_NOT_THERE = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO}


class FileStore(Store):
    """Entries as files. They are written through TensorStore's file driver: into a file beside the entry's, which is
    locked meanwhile and then renamed, so that a writer that is killed leaves no half entry. Files are not forced to the
    disk (`file_io_sync` is false): the checksum of the frame finds what a power cut tears.

    They are read as plain files: what the page cache holds goes straight to the caller, without waiting; what must come
    from the disk is read into a thread's own memory first, so that a read that hangs has nobody else's buffer.

    No link below the root is followed, though whoever may write there could put one in between; whoever may do so can
    forge entries as well. Folders are made for their owner only.

    Args:
        url: for messages.
        root: an absolute path; made if it is not there.
        writable: whether files may be changed at all.

    Raises:
        ValueError: the root cannot be used.
    """

    def __init__(self, url: str, root: str, *, writable: bool = True):
        super().__init__(url)
        self._root = usable_root(url, root, writable)
        self._writable = writable
        self._absent = absent()
        self._values = open_store({"driver": "file", "path": f"{self._root}/"}, {"file_io_sync": False})
        self._spare = threading.local()

    def write(self, name: EntryName, frame: memoryview, future: Handover[bool]) -> bool:
        """See `Store.write`."""
        for _ in range(_MORE_ATTEMPTS):
            try:
                return self._write(name, frame, future)
            except TierError as error:
                if error.errno != errno.ENOENT:  # else another process has removed a folder that was empty
                    raise
        return self._write(name, frame, future)

    def read(self, name: EntryName, buffer: memoryview, future: Handover[int]) -> int:
        """See `Store.read`."""
        with self._told(missing=name):
            file = self._open_at_once(name.text) or self._open(name.text)
            try:
                return self._read(file, buffer, future, name)
            finally:
                os.close(file)

    def has(self, name: EntryName) -> bool:
        """See `Store.has`."""
        folder, _, leaf = name.text.rpartition("/")
        try:
            with self._told(missing=name), self._folder(folder) as at:
                return stat.S_ISREG(os.stat(leaf, dir_fd=at, follow_symlinks=False).st_mode)
        except KeyError:
            return False

    def use(self, name: EntryName) -> None:
        """See `Store.use`: it is the time of the file."""
        with contextlib.suppress(OSError):
            file = self._open(name.text)
            try:
                self._note_use(file, os.fstat(file))
            finally:
                os.close(file)

    def delete(self, name: EntryName) -> bool:
        """See `Store.delete`."""
        folder, _, leaf = name.text.rpartition("/")
        try:
            with self._told(missing=name), self._folder(folder) as at:
                os.unlink(leaf, dir_fd=at)
        except KeyError:
            return False
        return True

    def folders(self, namespace: bytes | None = None) -> Iterator[str]:
        """See `Store.folders`."""
        depth = 2 if namespace else 3
        return self._below(folder_of(namespace).rstrip("/"), depth)

    def look(self, folder: str) -> Found:
        """See `Store.look`."""
        found = Found([], [])
        try:
            with self._told(missing=folder), self._folder(folder) as at, os.scandir(at) as files:
                for file in files:
                    text = f"{folder}/{file.name}"
                    name = parse_name(text.removesuffix(LOCK_SUFFIX))
                    if name is None or not file.is_file(follow_symlinks=False):
                        continue
                    if text.endswith(LOCK_SUFFIX):
                        found.strays.append(text)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        info = file.stat(follow_symlinks=False)
                        found.entries.append((name, info.st_size, info.st_mtime))
        except KeyError:
            return Found([], [])
        return found

    def remove_stray(self, stray: str) -> bool:
        """See `Store.remove_stray`."""
        folder, _, leaf = stray.rpartition("/")
        try:
            with self._told(missing=stray), self._folder(folder) as at:
                file = os.open(leaf, os.O_RDWR | _FILE, dir_fd=at)
                try:
                    return nobody_holds(file) and unlink_same(file, leaf, at)
                finally:
                    os.close(file)
        except KeyError:
            return False

    def remove_empty(self, folder: str) -> None:
        """See `Store.remove_empty`. The folder below the root stays: TensorStore makes those in it anew for a writer
        that is under way, and not for their owner only."""
        with contextlib.suppress(OSError):
            while is_folder(folder):
                above, _, leaf = folder.rpartition("/")
                with self._folder(above) as at:
                    os.rmdir(leaf, dir_fd=at)
                folder = above

    def _write(self, name: EntryName, frame: memoryview, future: Handover[bool]) -> bool:
        self._make_way(name)
        try:
            stamp = future.touch(lambda: self._values.write(name.text, contents(frame), if_equal=self._absent)).result()
        except STORE_ERRORS as error:
            raise store_failure(self.name, error) from None
        return bool(stamp.generation)

    def _open_at_once(self, text: str) -> int | None:
        """Opens an entry that no link leads to. `None` if that cannot be told: then `_open` must."""
        path = f"{self._root}/{text}"
        try:
            file = os.open(path, os.O_RDONLY | _FILE)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}") == path:
                return file
        os.close(file)
        return None

    def _open(self, text: str) -> int:
        folder, _, leaf = text.rpartition("/")
        with self._folder(folder) as at:
            return os.open(leaf, os.O_RDONLY | _FILE, dir_fd=at)

    def _read(self, file: int, buffer: memoryview, future: Handover[int], name: EntryName) -> int:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            raise KeyError(name)
        wanted, done = min(info.st_size, len(buffer)), 0
        while done < wanted:
            piece = buffer[done : min(wanted, done + _PIECE_BYTES)]
            moved = future.touch(lambda to=piece, at=done: read_cached(file, to, at))
            if not moved:
                moved = self._read_slowly(file, piece, done, future)
            if not moved:
                return done  # somebody cut the file
            done += moved
        self._note_use(file, info)
        return info.st_size

    def _note_use(self, file: int, info: os.stat_result) -> None:
        if self._writable and info.st_mtime < time.time() - REFRESH_S:
            with contextlib.suppress(OSError):  # the order of use is worth no failure
                os.utime(file)

    def _read_slowly(self, file: int, to: memoryview, at: int, future: Handover[int]) -> int:
        spare = getattr(self._spare, "buffer", None)
        if spare is None:
            spare = self._spare.buffer = memoryview(bytearray(_PIECE_BYTES))
        moved = os.preadv(file, [spare[: len(to)]], at)
        future.touch(lambda: to[:moved].__setitem__(slice(None), spare[:moved]))
        return moved

    def _make_way(self, name: EntryName) -> None:
        """Makes the folders of an entry. TensorStore would do so, but would make a root that has vanished as well, and
        would follow links."""
        folder, _, leaf = name.text.rpartition("/")
        with self._told(missing=None), self._folder(folder, make=True) as at:
            for file in (leaf, leaf + LOCK_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    if not stat.S_ISREG(os.stat(file, dir_fd=at, follow_symlinks=False).st_mode):
                        raise TierError(f"{self.name}: something that is no file is in an entry's place")

    def _below(self, folder: str, depth: int) -> Iterator[str]:
        if not depth:
            yield folder
            return
        try:
            with self._told(missing=folder), self._folder(folder) as at, os.scandir(at) as files:
                names = sorted(file.name for file in files if file.is_dir(follow_symlinks=False))
        except KeyError:
            return
        for name in names:
            yield from self._below(f"{folder}/{name}", depth - 1)

    @contextmanager
    def _folder(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """Opens a folder below the root, following no link."""
        try:
            at = os.open(self._root, FOLDER)
        except OSError as error:
            raise os_failure(self.name, error.errno) from None
        try:
            for part in folder.split("/"):
                above, at = at, open_folder(part, at, make)
                os.close(above)
            yield at
        finally:
            os.close(at)

    @contextmanager
    def _told(self, *, missing: object) -> Iterator[None]:
        """Turns errors of the operating system into those of a tier, and that something is not there, or is a link,
        into a `KeyError` of `missing`, unless that is `None`."""
        try:
            yield
        except TierError:
            raise
        except OSError as error:
            if missing is not None and error.errno in _NOT_THERE:
                raise KeyError(missing) from None
            raise os_failure(self.name, error.errno) from None

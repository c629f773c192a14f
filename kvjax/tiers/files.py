"""What the tier on a folder asks of the operating system."""

import contextlib
import errno
import fcntl
import os
import struct
import time

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_STRAY_AGE_S = 3600.0
_NOT_CACHED = {errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


def usable_root(url: str, root: str, writable: bool) -> str:
    """Returns the path of a folder without links, which is made if it is not there and may be written.

    Raises:
        ValueError: it cannot be used; the text names `url`.
    """
    needed = os.R_OK | os.X_OK | (os.W_OK if writable else 0)
    try:
        if writable:
            os.makedirs(root, mode=0o700, exist_ok=True)
        if not os.path.isdir(root):
            raise ValueError(f"{url!r} must be a folder")
        if not os.access(root, needed):
            raise ValueError(f"{url!r} must be a folder that may be {'written' if writable else 'read'}")
        return os.path.realpath(root)
    except FileExistsError:
        raise ValueError(f"{url!r} must be a folder") from None
    except OSError as error:
        raise ValueError(f"{url!r} cannot be used: {error.strerror}") from None


def open_folder(part: str, above: int, make: bool) -> int:
    """Opens a folder in another, which is no link; makes it, for its owner only, if it is not there and `make`."""
    try:
        return os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=above)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, mode=0o700, dir_fd=above)
    return os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=above)


def read_cached(file: int, to: memoryview, at: int) -> int:
    """Reads what memory holds already, and returns how many bytes that is; it never waits for a disk."""
    try:
        return os.preadv(file, [to], at, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in _NOT_CACHED:
            return 0
        raise


def nobody_holds(file: int) -> bool:
    """Takes the lock that TensorStore's writers hold, if nobody else has it, until `file` is closed. Where files
    cannot be locked, the file's age tells."""
    whole_file = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole_file)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        return os.fstat(file).st_mtime < time.time() - _STRAY_AGE_S
    return True


def unlink_same(file: int, leaf: str, folder: int) -> bool:
    """Unlinks an open file, unless its name belongs to another by now. A writer that waits for the lock sees
    afterwards that its file has no name, and makes a new one."""
    mine, named = os.fstat(file), os.stat(leaf, dir_fd=folder, follow_symlinks=False)
    if not os.path.samestat(mine, named):
        return False
    os.unlink(leaf, dir_fd=folder)
    return True

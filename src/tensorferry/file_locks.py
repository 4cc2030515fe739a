"""Locks of open files (F_OFD_SETLK), which the kernel drops with their holder.

Other than a process's locks they tell threads apart, and are not dropped when some other descriptor of the file is
closed. A forked child must close what it has inherited.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# struct flock: type, whence, start, length (0: to the end of all files), process.
_FLOCK = struct.Struct("hhqqi4x")

# Who has a directory alone only renames or removes what is in it.
_MAX_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.002
_MAX_OTHER_SAVE_SECONDS = 2.0


def open_lock_file(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of a regular file, made if missing; for reading only where it is another user's."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError as refused:  # another user's: it can be shared, but not had alone
        try:
            descriptor = os.open(path, flags | os.O_RDONLY)
        except OSError:  # or it is not there, and may not be made
            raise refused from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
    return descriptor


def set_lock(descriptor: int, kind: int, begin: int = 0, nbytes: int = 0) -> bool:
    """Set a lock, or return False: another one is in the way, and what was there before remains."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, begin, nbytes, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def lock_directory(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Lock an open directory (flock(2)); False: somebody else has, None: there are no such locks, as on NFS."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def unread(directory: str | os.PathLike[str]) -> Iterator[bool]:
    """Tell whether nobody reads a directory, as :func:`read_directory` shows; none begins before the block ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = lock_directory(descriptor)
        # Another save may be doing the same, for a moment; a load takes longer.
        limit = time.monotonic() + _MAX_OTHER_SAVE_SECONDS
        while found is False and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
            found = lock_directory(descriptor)
        yield found is not False
    finally:
        _unlock_directory(descriptor, os.getpid())


def read_directory(owner: object, directory: str | os.PathLike[str]) -> Callable[[], Any]:
    """Show others that a directory is read, until the result is called, or the owner goes.

    Raises
    ------
    FileNotFoundError
        There is none, or it has lost its name meanwhile.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:  # its files may be readable all the same
        return lambda: None
    let_go = weakref.finalize(owner, _unlock_directory, descriptor, os.getpid())
    let_go.atexit = False
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    try:
        while lock_directory(descriptor, fcntl.LOCK_SH) is False and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if not os.path.samestat(os.fstat(descriptor), os.stat(directory)):  # noqa: PTH116
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(directory))
    except BaseException:
        let_go()
        raise
    return let_go


def _unlock_directory(descriptor: int, process: int) -> None:
    # Closing is not enough while a child that was forked has the directory open; and a child lets its parent's lock be.
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_locked(descriptor: int) -> bool:
    """Return whether another one has the file for itself; nothing is locked by asking."""
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

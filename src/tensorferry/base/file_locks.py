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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.base.mounts import mount_if_seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# struct flock: type, whence, start, length (0: to the end of all files), process.
_FLOCK = struct.Struct("hhqqi4x")

# Who has a directory alone only renames or removes what is in it.
_MAX_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.002
_MAX_OTHER_SAVE_SECONDS = 2.0

# Where files' locks hold on all machines; those of directories are the kernel's own there, and hold on one.
REMOTE = frozenset(["ceph", "lustre", "nfs", "nfs4"])


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
def unread(directory: str | os.PathLike[str], name: str) -> Iterator[bool]:
    """Tell whether nobody reads a directory, as :func:`read_directory` shows; none begins before the block ends."""
    descriptors = _opened(directory, name, os.O_RDWR)
    try:
        # Another save may be doing the same, for a moment; a load takes longer.
        limit = time.monotonic() + _MAX_OTHER_SAVE_SECONDS
        while not (found := _lock(descriptors, fcntl.LOCK_EX)) and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        yield found
    finally:
        _unlock(descriptors, os.getpid())


def read_directory(
    owner: object, directory: str | os.PathLike[str], name: str
) -> Callable[[], Any]:
    """Show others that a directory is read, until the result is called, or the owner goes.

    On file systems that several machines share a file in it is locked, too, if there is one of that name.

    Raises
    ------
    FileNotFoundError
        There is none, or it has lost its name meanwhile.
    """
    try:
        descriptors = _opened(directory, name, os.O_RDONLY)
    except FileNotFoundError:
        raise
    except OSError:  # its files may be readable all the same
        return lambda: None
    let_go = weakref.finalize(owner, _unlock, descriptors, os.getpid())
    let_go.atexit = False
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    try:
        while not _lock(descriptors, fcntl.LOCK_SH) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if not os.path.samestat(os.fstat(descriptors[0]), os.stat(directory)):  # noqa: PTH116
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(directory))
    except BaseException:
        let_go()
        raise
    return let_go


def _opened(directory: str | os.PathLike[str], name: str, access: int) -> list[int]:
    """Return descriptors of what is locked: the directory, and the file where that says more."""
    found = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    mount = mount_if_seen(Path(directory))
    if mount is not None and mount["type"] in REMOTE:
        flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.suppress(OSError):
            found.append(os.open(name, flags, dir_fd=found[0]))
    return found


def _lock(descriptors: list[int], kind: int) -> bool:
    """Lock all of them, or return False; where there are no locks that is all there is to do."""
    for descriptor in descriptors[1:]:
        with contextlib.suppress(OSError):
            if not set_lock(descriptor, fcntl.F_RDLCK if kind == fcntl.LOCK_SH else fcntl.F_WRLCK):
                return False
    return lock_directory(descriptors[0], kind) is not False


def _unlock(descriptors: list[int], process: int) -> None:
    # Closing is not enough while a child that was forked has them open; and a child lets its parent's locks be.
    for descriptor in descriptors:
        if os.getpid() == process:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                if descriptor != descriptors[0]:
                    set_lock(descriptor, fcntl.F_UNLCK)
        os.close(descriptor)


def is_locked(descriptor: int) -> bool:
    """Return whether another one has the file for itself; nothing is locked by asking."""
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

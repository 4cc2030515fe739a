"""Locks of files (F_OFD_SETLK, fcntl(2)) and directories (flock(2)), released when the process that set them ends.

A *reader* loads files of a directory and sets a shared lock on the directory. A *writer* replaces or removes files
there and sets an exclusive lock.

Both kinds of lock belong to an open file description. Unlike POSIX locks, which belong to a process, they work between
threads, and closing another descriptor of the same file does not release them. A forked child shares the descriptions,
so it must close the descriptors that it has inherited: otherwise a lock could outlive the process that set it.
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

from tensorferry.base.mounts import mount_or_none

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# struct flock: type, whence, start, length (0: to the end of the file, however long it gets), process.
_FLOCK = struct.Struct("hhqqi4x")

# reader_lock() waits at most _MAX_WAIT_SECONDS for a writer that has locked the directory exclusively. A writer only
# renames or removes files in the directory meanwhile, which is quick. writer_lock() waits at most
# _MAX_OTHER_SAVE_SECONDS for other holders of a lock on the directory. Both try again every _POLL_SECONDS.
_MAX_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.002
_MAX_OTHER_SAVE_SECONDS = 2.0

# Types of file systems that several machines share. A lock of a file is visible to all of these machines; a lock of a
# directory only to the machine that set it.
REMOTE = frozenset(["ceph", "lustre", "nfs", "nfs4"])


def open_lock_file(path: str | os.PathLike[str]) -> int:
    """Open a lock file, created if missing, and return its descriptor; read-only if the file is another user's."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError as refused:
        # Another user's file: a read-only descriptor suffices for a shared lock.
        try:
            descriptor = os.open(path, flags | os.O_RDONLY)
        except OSError:  # the file does not exist and may not be created
            raise refused from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return descriptor


def set_lock(descriptor: int, kind: int, begin: int = 0, nbytes: int = 0) -> bool:
    """Set a lock and return True, or return False and change nothing if another holder has a conflicting lock.

    ``kind`` is F_RDLCK, F_WRLCK or F_UNLCK. The lock covers ``nbytes`` bytes from ``begin``; 0 is up to the file's end.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, begin, nbytes, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def lock_directory(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Try to lock an open directory (flock(2)); return whether that succeeded, or None if unsupported, as on NFS."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def writer_lock(directory: str | os.PathLike[str], name: str) -> Iterator[bool]:
    """Lock a directory exclusively during the block; yield whether that succeeded: False if a reader has locked it.

    With the lock, no reader can lock the directory before the block ends. ``name`` is as for :func:`reader_lock`.
    """
    descriptors = _open_all(directory, name, os.O_RDWR)
    try:
        # Retry for a while: another writer holds the lock only for a short time. A reader may hold it for longer than
        # this loop waits, and then the lock is not obtained.
        limit = time.monotonic() + _MAX_OTHER_SAVE_SECONDS
        while not (found := _lock(descriptors, fcntl.LOCK_EX)) and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        yield found
    finally:
        _unlock(descriptors, os.getpid())


def reader_lock(owner: object, directory: str | os.PathLike[str], name: str) -> Callable[[], Any]:
    """Lock a directory for reading, and return a function that unlocks it; deleting ``owner`` unlocks it, too.

    The lock is shared between readers. On file systems that several machines share, the file ``name`` in the directory
    is also locked if it exists. If a writer still has the directory after 10 seconds, or if locks are not possible, the
    function returns without a lock, because the files can be read nevertheless.

    Raises
    ------
    FileNotFoundError
        The directory does not exist, or was renamed or removed meanwhile.
    """
    try:
        descriptors = _open_all(directory, name, os.O_RDONLY)
    except FileNotFoundError:
        raise
    except OSError:  # no lock is possible, but the files in the directory may still be readable
        return lambda: None
    unlock = weakref.finalize(owner, _unlock, descriptors, os.getpid())
    unlock.atexit = False
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    try:
        while not _lock(descriptors, fcntl.LOCK_SH) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if not os.path.samestat(os.fstat(descriptors[0]), os.stat(directory)):  # noqa: PTH116
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(directory))
    except BaseException:
        unlock()
        raise
    return unlock


def _open_all(directory: str | os.PathLike[str], name: str, access: int) -> list[int]:
    """Return the descriptors to lock: the directory's, and on a file system in REMOTE that of its file ``name``."""
    # This comes first, because an interrupt in it would leave the descriptor open.
    mount = mount_or_none(Path(directory))
    found = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    if mount is not None and mount["type"] in REMOTE:
        flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.suppress(OSError):
            found.append(os.open(name, flags, dir_fd=found[0]))
    return found


def _lock(descriptors: list[int], kind: int) -> bool:
    """Lock all descriptors of _open_all(), or return False if another holder has locked one of them.

    A descriptor on a file system without locks is ignored.
    """
    for descriptor in descriptors[1:]:
        with contextlib.suppress(OSError):
            if not set_lock(descriptor, fcntl.F_RDLCK if kind == fcntl.LOCK_SH else fcntl.F_WRLCK):
                return False
    return lock_directory(descriptors[0], kind) is not False


def _unlock(descriptors: list[int], process: int) -> None:
    # Unlock explicitly, because closing alone does not release a lock while a forked child has the descriptor open. A
    # forked child only closes its descriptors: unlocking them would release the lock of its parent.
    for descriptor in descriptors:
        if os.getpid() == process:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                if descriptor != descriptors[0]:
                    set_lock(descriptor, fcntl.F_UNLCK)
        os.close(descriptor)


def is_locked(descriptor: int) -> bool:
    """Return whether another holder has an exclusive lock on the file, without locking it."""
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

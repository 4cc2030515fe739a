"""Ownership of a directory: only one store at a time writes named files into it.

The store holds a lock on a small file in the directory. The kernel releases the lock when the process ends. The file
contains the process ID and the run of the holder (the random identifier in its file names), for messages and for
processes that open a commit of a store that is still writing. The file stays in the directory: if it were removed, two
stores could lock different files of this name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os

from tensorferry.base.file_locks import is_locked, open_lock_file, set_lock
from tensorferry.base.processes import lock_descriptors, when_dropped
from tensorferry.errors import StorageError
from tensorferry.transfer.publication import storage_errors

LOCK_NAME = ".tensorferry-store.lock"
_MAX_NBYTES = 4096
# The errors of is_locked() on a file system without locks. No store can own a directory there.
_NO_LOCKS = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Ownership:
    """The exclusive ownership of one directory. The constructor raises StorageError (EBUSY) if another store has it."""

    def __init__(self, directory: str, run: str) -> None:
        path = os.path.join(directory, LOCK_NAME)  # noqa: PTH118
        try:
            descriptor = open_lock_file(path)
            try:
                is_locked_here = set_lock(descriptor, fcntl.F_WRLCK)
                if is_locked_here:
                    os.ftruncate(descriptor, 0)
                    os.pwrite(
                        descriptor, json.dumps({"process": os.getpid(), "run": run}).encode(), 0
                    )
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise StorageError(
                error.errno, f"{error.strerror} (locking the directory of a store)", path
            ) from None
        if not is_locked_here:
            process, _ = _holder(descriptor)
            os.close(descriptor)
            raise busy_error(directory, process, "writes into this directory")
        lock_descriptors.add(descriptor)
        self._descriptor = descriptor
        self._dropped = when_dropped(self, _unlock, descriptor)

    def release(self) -> None:
        """Release the directory for other stores."""
        # A finalizer runs only once. If Ctrl-C interrupts the unlock, the finalizer must remain for another attempt, so
        # this calls the function directly and detaches the finalizer afterwards.
        _unlock(self._descriptor)
        self._dropped.detach()


def busy_error(directory: str, process: int | None, reason: str) -> StorageError:
    """Return the exception for a directory that another store uses."""
    holder = "another process" if process is None else f"process {process}"
    return StorageError(
        errno.EBUSY, f"{os.strerror(errno.EBUSY)} (a store of {holder} {reason})", directory
    )


def writer_of(directory: str) -> tuple[int | None, str] | None:
    """Return the process ID and the run of the store that writes into a directory, or None if there is none.

    Raises
    ------
    StorageError
        It is unknown whether a store writes into the directory.
    """
    path = os.path.join(directory, LOCK_NAME)  # noqa: PTH118
    with storage_errors(path, "looking for the writer of a store"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            return _holder(descriptor) if is_locked(descriptor) else None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return None
        finally:
            os.close(descriptor)


def _holder(descriptor: int) -> tuple[int | None, str]:
    try:
        content = json.loads(os.pread(descriptor, _MAX_NBYTES, 0))
        return int(content["process"]), str(content["run"])
    except (ValueError, TypeError, KeyError, OSError):
        return None, ""


def _unlock(descriptor: int) -> None:
    lock_descriptors.unlock(descriptor, lambda: set_lock(descriptor, fcntl.F_UNLCK))

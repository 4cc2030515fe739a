"""Whose a directory is: one store at a time writes files with names into it.

A lock on one small file says so, which the kernel drops with its holder. The file has the holder's process and run, for
messages, and for who reads what a store that is still alive has committed. It stays in the directory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os

from tensorferry.base.file_locks import is_locked, open_lock_file, set_lock
from tensorferry.base.processes import lock_descriptors, when_dropped
from tensorferry.errors import StorageError

LOCK_NAME = ".tensorferry-store.lock"
_MAX_NBYTES = 4096


class Ownership:
    """A store's, of one directory; StorageError (EBUSY) where it is another's."""

    def __init__(self, directory: str, run: str) -> None:
        path = os.path.join(directory, LOCK_NAME)  # noqa: PTH118
        try:
            descriptor = open_lock_file(path)
            try:
                mine = set_lock(descriptor, fcntl.F_WRLCK)
                if mine:
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
        if not mine:
            process, _ = _holder(descriptor)
            os.close(descriptor)
            raise busy(directory, process, "writes into this directory")
        lock_descriptors.add(descriptor)
        self._descriptor = descriptor
        self._dropped = when_dropped(self, _leave, descriptor)

    def leave(self) -> None:
        """Let others have the directory."""
        # Not by the finalizer, which is called once only: Ctrl-C may come in the middle, and then this is called again.
        _leave(self._descriptor)
        self._dropped.detach()


def busy(directory: str, process: int | None, what: str) -> StorageError:
    """Build the exception for a directory that is another store's."""
    whose = "another process" if process is None else f"process {process}"
    return StorageError(
        errno.EBUSY, f"{os.strerror(errno.EBUSY)} (a store of {whose} {what})", directory
    )


def writer_of(directory: str) -> tuple[int | None, str] | None:
    """Return process and run of the store that writes into a directory; None where there is none."""
    try:
        descriptor = os.open(
            os.path.join(directory, LOCK_NAME),  # noqa: PTH118
            os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
        )
    except OSError:
        return None
    try:
        return _holder(descriptor) if is_locked(descriptor) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> tuple[int | None, str]:
    try:
        told = json.loads(os.pread(descriptor, _MAX_NBYTES, 0))
        return int(told["process"]), str(told["run"])
    except (ValueError, TypeError, KeyError, OSError):
        return None, ""


def _leave(descriptor: int) -> None:
    lock_descriptors.unlock(descriptor, lambda: set_lock(descriptor, fcntl.F_UNLCK))

"""An open directory of a store: its files, and the lock by which only one store at a time writes named files into it.

All files are accessed through one descriptor of the directory, so they stay the same files if the directory is renamed
and another one gets its name. The lock is a lock on a small file in the directory, which the kernel releases when the
process ends. The file has the process and the run of the last holder, for messages and for processes that open a commit
of a store that is still writing. It stays in the directory: if it were removed, two stores could lock different files
of this name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
from typing import TYPE_CHECKING

from tensorferry.base.file_locks import is_locked, open_lock_file, set_lock
from tensorferry.base.processes import LockedFile, when_dropped
from tensorferry.errors import StorageError
from tensorferry.transfer.publication import (
    OWN_FILES,
    storage_errors,
    sync_open_directory,
    write_temporary,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

LOCK_NAME = ".tensorferry-store.lock"
_LOCK_NBYTES = 256
# The errors of is_locked() on a file system without locks. No store can own a directory there.
_NO_LOCKS = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Folder:
    """An open directory.

    Attributes
    ----------
    path : str
        The path at which the directory was opened, for messages.
    inner : str
        A path that leads to the directory through its descriptor, whatever its name is.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with storage_errors(path, "opening a directory of a store"):
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.inner = f"{OWN_FILES}/{self.descriptor}"
        self._closing = when_dropped(self, os.close, self.descriptor)
        self._lock: LockedFile | None = None

    def join(self, name: str) -> str:
        """Return the path of a file, for messages."""
        return f"{self.path}/{name}"

    @contextlib.contextmanager
    def opened(
        self, name: str, flags: int, what: str = "opening a segment of a store"
    ) -> Iterator[int]:
        """Open a file for the block. Do not follow a symbolic link, and do not block on a FIFO."""
        with storage_errors(self.join(name), what):
            flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            descriptor = os.open(name, flags, 0o666, dir_fd=self.descriptor)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def unlink(self, name: str) -> None:
        """Remove a file, if it exists."""
        missing = contextlib.suppress(FileNotFoundError)
        with storage_errors(self.join(name), "removing a store's files"), missing:
            os.unlink(name, dir_fd=self.descriptor)

    def write(self, name: str, data: bytes, *, sync: bool) -> None:
        """Write a manifest. If this fails, it is removed."""
        with storage_errors(self.join(name), "writing the manifest of a store"):
            write_temporary(pathlib.Path(self.inner, name), data, sync=sync)
            if sync:
                sync_open_directory(self.descriptor)

    def names(self) -> set[str]:
        """Return the names of all files."""
        with storage_errors(self.path, "listing a store's files"):
            return set(os.listdir(self.descriptor))  # noqa: PTH208

    def sync(self) -> None:
        """Make the names in the directory durable."""
        with storage_errors(self.path, "syncing the directory of a store"):
            sync_open_directory(self.descriptor)

    def is_at(self, path: str) -> bool:
        """Return whether a path leads to this directory."""
        return os.path.samestat(os.stat(path), os.fstat(self.descriptor))  # noqa: PTH116

    def check_names(self, names: Collection[str]) -> None:
        """Raise StorageError unless the directory has its path, its lock and these files."""
        with storage_errors(self.path, "looking for the directory of a store"):
            if not self.is_at(self.path):
                raise OSError(errno.ESTALE, "The directory was renamed, and another has its name")
            if missing := {LOCK_NAME, *names} - self.names():
                message = f"{min(missing)!r} was removed while the store was open"
                raise OSError(errno.ENOENT, message)

    # The lock

    def lock(self, run: str) -> None:
        """Lock the directory for a run.

        Raises
        ------
        StorageError
            Another store has the lock (EBUSY), or the lock file cannot be used.
        """
        with storage_errors(self.join(LOCK_NAME), "locking the directory of a store"):
            descriptor = open_lock_file(f"{self.inner}/{LOCK_NAME}")
            lock = LockedFile(descriptor, lambda: set_lock(descriptor, fcntl.F_UNLCK))
            try:
                if not set_lock(descriptor, fcntl.F_WRLCK):
                    raise self._busy(_holder(descriptor)[0], "writes into this directory")
                # One write of a fixed size: a reader finds the old content or the new one.
                content = json.dumps({"process": os.getpid(), "run": run}).ljust(_LOCK_NBYTES)
                os.pwrite(descriptor, content.encode(), 0)
            except BaseException:
                lock.close()
                raise
        self._lock = lock

    def release(self) -> None:
        """Release the lock, and close the directory."""
        if self._lock is not None:
            self._lock.close()
        self._closing()

    def check_no_writer(self, run: str) -> None:
        """Raise StorageError (EBUSY) if the store of a run is still open, and may overwrite the data of its commit.

        Raises
        ------
        StorageError
            It is so, or it is unknown whether it is so.
        """
        if LOCK_NAME not in self.names():
            return
        try:
            with self.opened(LOCK_NAME, os.O_RDONLY, "looking for the writer of a store") as lock:
                process, holder = _holder(lock)
                if holder == run and is_locked(lock):
                    raise self._busy(
                        process,
                        "is open, and may overwrite the data of its commit; remedy: close that store, or open a "
                        "snapshot of it",
                    )
        except StorageError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def _busy(self, process: int | None, reason: str) -> StorageError:
        holder = "another process" if process is None else f"process {process}"
        message = f"{os.strerror(errno.EBUSY)} (a store of {holder} {reason})"
        return StorageError(errno.EBUSY, message, self.path)


def _holder(descriptor: int) -> tuple[int | None, str]:
    """Return the process and the run in a lock file."""
    try:
        content = json.loads(os.pread(descriptor, _LOCK_NBYTES, 0))
        return int(content["process"]), str(content["run"])
    except (ValueError, TypeError, KeyError, OSError):
        return None, ""

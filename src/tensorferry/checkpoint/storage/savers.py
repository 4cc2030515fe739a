"""Detection of concurrent saves into a directory, by locks on a small file in it; the kernel releases them on exit.

Each save holds a shared lock from before its first file is created until its last step. A save that can make its lock
exclusive knows that no other save is alive, and that none begins while it holds the lock; only then may it remove files
of unknown saves. A second lock serializes commits.

The locks belong to open file descriptions (F_OFD_SETLK). Unlike a process's POSIX locks they distinguish threads, and
survive the closing of another descriptor of the file; a forked child closes the descriptors that it has inherited. The
coordinator's lock covers all ranks, because their files never become part of a checkpoint without it. The last save to
leave removes the file.

Where locks do not exist, or may not reach all machines that share the directory (FUSE, NFS with `nolock` or
`local_lock`), no save ever gets exclusive access, and the leftovers of killed saves stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import time
from typing import TYPE_CHECKING

from tensorferry.base.file_locks import REMOTE, open_lock_file, set_lock
from tensorferry.base.mounts import LOCAL_FILE_SYSTEMS, mount_or_none
from tensorferry.base.processes import LockedFile, lock_descriptors
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_NAME = ".tensorferry.lock"

# Offsets, in the lock file, of the range of bytes for the shared locks of live saves, and of the range for the commit
# lock. A save of all ranks locks the whole range; a rank that saves without the others locks one byte of it.
_PRESENCE, _TURNS, _RANGE_NBYTES = 0, 1 << 32, 1 << 32

# The timeout of a lock: exclusive locks are held only for a few file operations.
_MAX_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.005

# Mount options of remote file systems with which locks do not reach other machines.
_LOCAL_LOCKS = frozenset(["nolock", "local_lock=all", "local_lock=posix", "localflock"])

# Errors that every save into the directory gets: locks are not supported, or another kind of file has this name. After
# them a save goes on without a lock, because no other save can have one either.
_NO_LOCKS = frozenset(
    [
        *(errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOLCK),
        *(errno.ENOSYS, errno.ENXIO, errno.EOPNOTSUPP),
    ]
)


class Saver:
    """The locks of one save into a directory.

    Parameters
    ----------
    directory : Path
        The checkpoint's directory, which exists.
    rank : int, optional
        The rank, if it saves without the others. Its save conflicts with saves of all ranks and with other saves of
        this rank, but not with saves of other single ranks.
    """

    def __init__(self, directory: Path, rank: int | None) -> None:
        self._offset, self._nbytes = (0, _RANGE_NBYTES) if rank is None else (rank, 1)
        self._held: LockedFile | None = None
        self._path = path = directory / LOCK_NAME
        reach_all = _reach_all(directory)
        try:
            self._held = self._enter(path)
        except OSError as error:
            # If no save can have a lock, or locks do not reach all machines, no save ever gets exclusive access, so it
            # is safe to continue without a lock. But where other saves can lock, they would not see this save, and
            # would remove its files.
            if isinstance(error, StorageError):
                raise
            if error.errno not in _NO_LOCKS and reach_all:
                message = (
                    f"{error.strerror} (opening {path.name}, the lock file by which concurrent saves see "
                    "each other)"
                )
                raise StorageError(error.errno, message, str(directory)) from error
        # Whether all other saves into the directory see the locks; if not, exclusive access is never granted.
        self.reaches_all = self._held is not None and reach_all

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Yield whether no other save is alive; if so, none begins before the end of the block."""
        locked = self.reaches_all and self._lock(fcntl.F_WRLCK, _PRESENCE)
        try:
            # If the lock file has been removed, later saves lock a new file and do not see this lock. So the locked
            # file must still be at the path.
            yield locked and self._descriptor is not None and _is_at(self._descriptor, self._path)
        finally:
            if locked:
                self._lock(fcntl.F_RDLCK, _PRESENCE)

    @contextlib.contextmanager
    def commit_turn(self) -> Iterator[None]:
        """Wait for the commit lock; CheckpointError if another save holds it for too long."""
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        while not (mine := self._lock(fcntl.F_WRLCK, _TURNS)):
            if self._descriptor is None or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        if self._descriptor is not None and not mine:
            raise CheckpointError(
                f"another save has been committing for {_MAX_WAIT_SECONDS:.0f} seconds (likely causes: it is stopped, "
                "or its drive does not respond)",
                str(self._path),
            )
        try:
            yield
        finally:
            if mine:
                self._lock(fcntl.F_UNLCK, _TURNS)

    def leave(self) -> None:
        """Release all locks; this also happens when the object is freed."""
        self.reaches_all = False
        if self._held is not None:
            self._held.close()

    @property
    def _descriptor(self) -> int | None:
        """The descriptor of the lock file; None without a lock, and in a forked child."""
        found = None if self._held is None else self._held.descriptor
        return found if found in lock_descriptors else None

    def _enter(self, path: Path) -> LockedFile:
        """Return the lock file with a shared lock on it."""
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        while time.monotonic() < deadline:
            descriptor = open_lock_file(path)
            held = LockedFile(descriptor, functools.partial(_unlock, descriptor, path))
            try:
                locked = set_lock(descriptor, fcntl.F_RDLCK, _PRESENCE + self._offset, self._nbytes)
                # The last save to leave may have removed the file between open and lock; if so, try again.
                if locked and _is_at(descriptor, path):
                    return held
            except BaseException:
                held.close()
                raise
            held.close()
            if not locked:
                time.sleep(_POLL_SECONDS)
        raise CheckpointError(
            f"another save has had exclusive access to the directory for {_MAX_WAIT_SECONDS:.0f} seconds, and would "
            "remove the files of this one (likely causes: it is stopped, or its drive does not respond)",
            str(path),
        )

    def _lock(self, kind: int, where: int) -> bool:
        descriptor = self._descriptor
        if descriptor is None:
            return False
        try:
            return set_lock(descriptor, kind, where + self._offset, self._nbytes)
        except OSError:  # e.g. an exclusive lock needs a writable descriptor
            return False


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _unlock(descriptor: int, path: Path) -> None:
    set_lock(descriptor, fcntl.F_UNLCK, 0, 0)
    # The exclusive lock succeeds only for the last save to leave. A save that begins now finds the file removed, and
    # creates another.
    if set_lock(descriptor, fcntl.F_WRLCK, 0, 0):
        if _is_at(descriptor, path):
            path.unlink()
        set_lock(descriptor, fcntl.F_UNLCK, 0, 0)


def _reach_all(directory: Path) -> bool:
    """Return whether locks are known to exclude saves on all machines that share a directory."""
    mount = mount_or_none(directory)
    if mount is None:
        return False
    options = set(mount["options"].split(","))
    if mount["type"] == "lustre" and "flock" not in options:
        return False
    return mount["type"] in LOCAL_FILE_SYSTEMS or (
        mount["type"] in REMOTE and not options & _LOCAL_LOCKS
    )

"""Who else is saving into a directory: locks on one small file in it, which the kernel drops with their holder.

Each save holds a shared lock from before its first file is made until its last step. What belongs to nobody may only be
removed by one that can make its lock exclusive, for then no other save is alive, and none begins meanwhile. A second
lock lets saves take turns at replacing metadata.

They are locks of open files (F_OFD_SETLK): other than a process's, they tell threads apart, and are not dropped when
some other descriptor of the file is closed; a forked child closes what it has inherited. The coordinator's lock stands
for all ranks: without it their files never become part of a checkpoint. The file is removed by the last one to leave.

Where there are no locks, or they may not reach all machines that share the directory (FUSE, NFS with `nolock` or
`local_lock`), nobody is ever found to be alone, and the leftovers of killed saves stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from typing import TYPE_CHECKING

from tensorferry.base.file_locks import REMOTE, open_lock_file, set_lock
from tensorferry.base.mounts import LOCAL_FILE_SYSTEMS, mount_if_seen
from tensorferry.base.processes import lock_descriptors, when_dropped
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOCK_NAME = ".tensorferry.lock"

# Where the locks lie. A rank that saves without the others has a byte of its own in each range.
_PRESENCE, _TURNS, _RANGE_NBYTES = 0, 1 << 32, 1 << 32

# A lock is waited for so long: those that are not shared are held for some file operations only.
_MAX_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.005

_LOCAL_LOCKS = frozenset(["nolock", "local_lock=all", "local_lock=posix", "localflock"])

# What is said where nobody can have locks: there are none, or the file's name is something else's.
_NO_LOCKS = frozenset(
    [
        *(errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOLCK),
        *(errno.ENOSYS, errno.ENXIO, errno.EOPNOTSUPP),
    ]
)


class Saver:
    """One save's place among those that save into a directory.

    Parameters
    ----------
    directory : Path
        The checkpoint's; it exists.
    rank : int, optional
        The rank, if it saves without the others: it meets saves of all ranks, and its own.
    """

    def __init__(self, directory: Path, rank: int | None) -> None:
        self._offset, self._nbytes = (0, _RANGE_NBYTES) if rank is None else (rank, 1)
        self._descriptor: int | None = None
        self._leave: Callable[[], object] = lambda: None
        self._path = path = directory / LOCK_NAME
        try:
            self._descriptor = self._enter(path)
        except OSError as error:
            # Where there are no locks for anybody, or they do not reach all, nobody is ever alone. But a save that is
            # the only one without a lock would not be seen by the others, and they would remove its files.
            if isinstance(error, StorageError):
                raise
            if error.errno not in _NO_LOCKS and _reach_all(directory):
                message = f"{error.strerror} (opening {path.name}, which shows others that a save is alive)"
                raise StorageError(error.errno, message, str(directory)) from error
        if self._descriptor is not None:
            self._leave = when_dropped(self, _leave, self._descriptor, path)
        self._reaches_all = self._descriptor is not None and _reach_all(directory)

    @property
    def reaches_all(self) -> bool:
        """Whether all others that save here would see the locks; elsewhere nobody is ever alone."""
        return self._reaches_all

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Tell whether no other save is alive; if so, none begins before the end of the block."""
        locked = self._reaches_all and self._lock(fcntl.F_WRLCK, _PRESENCE)
        try:
            # Who comes after somebody has removed the file makes another one.
            yield locked and self._descriptor is not None and _is_at(self._descriptor, self._path)
        finally:
            if locked:
                self._lock(fcntl.F_RDLCK, _PRESENCE)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other save is in such a block; CheckpointError where one stays there for long."""
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        mine = False
        while self._descriptor is not None and not mine and time.monotonic() < deadline:
            mine = self._lock(fcntl.F_WRLCK, _TURNS)
            if not mine:
                time.sleep(_POLL_SECONDS)
        if self._descriptor is not None and not mine:
            raise CheckpointError(
                f"another save has been about to commit for {_MAX_WAIT_SECONDS:.0f} seconds (is it stopped, or its "
                "drive stuck?)",
                str(self._path),
            )
        try:
            yield
        finally:
            if mine:
                self._lock(fcntl.F_UNLCK, _TURNS)

    def leave(self) -> None:
        """Let go of everything; it happens by itself when the object goes."""
        self._descriptor, self._reaches_all = None, False
        self._leave()

    def _enter(self, path: Path) -> int:
        """Return a descriptor of the lock file that has the shared lock."""
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        while time.monotonic() < deadline:
            descriptor = open_lock_file(path)
            try:
                locked = set_lock(descriptor, fcntl.F_RDLCK, _PRESENCE + self._offset, self._nbytes)
                # Who was the last to leave has removed it, perhaps just now.
                if locked and _is_at(descriptor, path):
                    lock_descriptors.add(descriptor)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if not locked:
                time.sleep(_POLL_SECONDS)
        raise CheckpointError(
            f"another save has kept the directory to itself for {_MAX_WAIT_SECONDS:.0f} seconds, and would remove "
            "the files of one that does not wait (is it stopped, or its drive stuck?)",
            str(path),
        )

    def _lock(self, kind: int, where: int) -> bool:
        descriptor = self._descriptor
        if descriptor is None or descriptor not in lock_descriptors:
            return False
        try:
            return set_lock(descriptor, kind, where + self._offset, self._nbytes)
        except OSError:  # a lock of this kind needs a file that may be written, for example
            return False


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _leave(descriptor: int, path: Path) -> None:
    def unlock() -> None:
        set_lock(descriptor, fcntl.F_UNLCK, 0, 0)
        # Where all are gone the last one succeeds; who comes now finds it removed, and makes another one.
        if set_lock(descriptor, fcntl.F_WRLCK, 0, 0):
            if _is_at(descriptor, path):
                path.unlink()
            set_lock(descriptor, fcntl.F_UNLCK, 0, 0)

    lock_descriptors.unlock(descriptor, unlock)


def _reach_all(directory: Path) -> bool:
    """Return whether locks are known to hold on all machines that see a directory."""
    mount = mount_if_seen(directory)
    if mount is None:
        return False
    options = set(mount["options"].split(","))
    if mount["type"] == "lustre" and "flock" not in options:
        return False
    return mount["type"] in LOCAL_FILE_SYSTEMS or (
        mount["type"] in REMOTE and not options & _LOCAL_LOCKS
    )

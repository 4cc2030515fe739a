"""Atomic and durable names: temporary files of atomic replacement, renames, new and synced directories.

The temporary file (:class:`Temporary`) is in the directory of the file that it will replace. A writer holds a lock
(fcntl(2)) on it, which the kernel releases when the writer's process ends, in whatever way. Each new temporary file
removes those of its directory that killed writers have left: files that have a name which only this module makes, and
that are not locked. Other machines may not see the locks on a file system that they share, and some file systems have
no locks. There, a file is removed only if in addition nothing was written to it for a day.

:mod:`tensorferry.transfer.replacement` writes large files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.base.file_locks import set_lock
from tensorferry.base.mounts import is_local, mount_or_none
from tensorferry.base.processes import Owned, in_forked_children, lock_descriptors
from tensorferry.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Self

    from tensorferry.base.checks import Path as AnyPath

TEMPORARY_NAME = re.compile(r"\.tensorferry-new-[0-9a-f]{16}\.tmp", re.ASCII)
"""The names of temporary files."""

# Where other machines may not see the locks, a file that was written more recently may still have a writer.
_MAX_PAUSE_SECONDS = 24 * 3600.0
# If the lock of a new file cannot be set, another file is created, at most this number of times.
_MAX_ATTEMPTS = 100
# Listing a large directory takes long, so one of n entries is listed only for one in n / _LISTED_ENTRIES new files.
_LISTED_ENTRIES = 1000
# How many new files each directory (device and inode) gets before it is listed again. Cleared at _MAX_KNOWN entries.
_unlisted: dict[tuple[int, int], int] = {}
_MAX_KNOWN = 1024
# The names of this process's temporary files, which need no look at their locks. A forked child has none.
_own_names: set[str] = set()
in_forked_children(_own_names.clear)

# Errors of fsync() on file systems that cannot sync a directory; the core has the same list.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
# Errors of rename() that FUSE may return for an open file. FUSE may consider a file open for a while after close(2).
_STILL_OPEN = (errno.EPERM, errno.EACCES, errno.EBUSY, errno.EOPNOTSUPP, errno.ETXTBSY)
# How long, and how often, to try again: a busy server may take long for each answer.
_STILL_OPEN_SECONDS = 2.0
_STILL_OPEN_ATTEMPTS = 100
_POLL_SECONDS = 0.002
# The kernel's folder with a path for each open descriptor of this process. The path leads to the open file even after
# that file has been renamed or removed.
OWN_FILES = "/proc/self/fd"


@contextlib.contextmanager
def storage_errors(path: AnyPath, what: str = "") -> Iterator[None]:
    """Raise an OSError of the block as a StorageError for ``path``; the message has the operation ``what``."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"{reason} ({what})" if what else reason
        raise StorageError(error.errno, message, os.fsdecode(path)) from None


class Temporary(Owned):
    """A new file that is renamed when it is complete. As a context manager it is removed if it was not renamed.

    Parameters
    ----------
    directory : Path
        An existing directory.
    mode : int
        The permissions of the new file; the umask applies.

    Raises
    ------
    OSError
        The file cannot be created.

    Attributes
    ----------
    name : str
        The temporary name; empty once the file has been renamed or removed.
    directory, descriptor : int
        The open directory, and the file, open for reading and writing; -1 once they are closed.
    is_local : bool
        Whether the file system is known to belong to this machine alone.
    """

    def __init__(self, directory: Path, mode: int = 0o666) -> None:
        self._set_owner()
        self.name, self.is_local = "", False
        self.directory = self.descriptor = -1
        try:
            self.directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.is_local = is_local(self.directory)
            self._create(mode)
            with contextlib.suppress(OSError):  # e.g. the directory may not be listed
                _remove_abandoned(self)
        except BaseException:
            self.remove()
            raise

    def _create(self, mode: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(_MAX_ATTEMPTS):
            # The name is stored before the file exists, so that remove() finds it after an interrupt at any moment.
            self.name = new_name()
            _own_names.add(self.name)
            self.descriptor = os.open(self.name, flags, mode, dir_fd=self.directory)
            # A forked child closes its copy, which would keep the lock after this process was killed.
            lock_descriptors.add(self.descriptor)
            # Before it is locked, another process may take the file for one that a killed writer has left. That
            # process then holds the lock, or it has removed the file.
            if _lock(self.descriptor, fcntl.F_WRLCK) is not False and self._exists():
                return
            self.close()
            _own_names.discard(self.name)
        raise OSError(errno.EAGAIN, "another process locks every new file", self.name)

    def _exists(self) -> bool:
        try:
            os.stat(self.name, dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def write(self, *parts: bytes, sync: bool) -> None:
        """Write small data. With ``sync`` it is durable."""
        _write_all(self.descriptor, parts, sync)

    def rename(self, name: str) -> None:
        """Rename the file within its directory, where it replaces an existing one, and close it."""
        if not self.is_local:
            # FUSE file systems of object stores may refuse to rename an open file, or rename it without its data.
            self.close()
        rename(self.name, name, directory=self.directory)
        self._forget_name()
        self.close()

    def _forget_name(self) -> None:
        _own_names.discard(self.name)
        self.name = ""

    def close(self) -> None:
        """Close the file, which also unlocks it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0 and not self.is_parents:
            # A child that was forked by C code, without Python's fork handlers, may have a copy of the descriptor.
            _lock(descriptor, fcntl.F_UNLCK)
            lock_descriptors.forget(descriptor)
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the file unless it was renamed, and close it and the directory. A second call has no effect."""
        if self.directory >= 0 and not self.is_parents:
            # Errors are ignored here: the error for which the file is removed matters more.
            with contextlib.suppress(OSError):
                if not self.is_local:  # FUSE would rename an open file instead of removing it
                    self.close()
            with contextlib.suppress(OSError):
                if self.name:
                    os.unlink(self.name, dir_fd=self.directory)
                    # Free the space now: a request in the traceback of an exception may keep the file open for long. A
                    # file that was renamed is never truncated, even if another one has replaced it.
                    if self.descriptor >= 0 and os.fstat(self.descriptor).st_nlink == 0:
                        os.ftruncate(self.descriptor, 0)
            self._forget_name()
            self.close()
        # The attribute is reset first: a second call, for example by a signal handler, must not close the same number
        # again, which may be that of another file by then.
        directory, self.directory = self.directory, -1
        if directory >= 0:
            os.close(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __del__(self) -> None:
        if getattr(self, "directory", -1) >= 0:
            self.remove()


def new_name() -> str:
    """Return a random name. It has 64 random bits, so no other file has this name."""
    return f".tensorferry-new-{secrets.token_hex(8)}.tmp"


def _lock(descriptor: int, kind: int) -> bool | None:
    """Set a lock; return whether that succeeded, or None if the file system has no locks."""
    try:
        return set_lock(descriptor, kind)
    except OSError:
        return None


def _remove_abandoned(new: Temporary) -> None:
    """Remove the temporary files in the directory of ``new`` whose writers have ended."""
    status = os.fstat(new.directory)
    known = status.st_dev, status.st_ino
    if (left := _unlisted.get(known, 0)) > 0:
        _unlisted[known] = left - 1
        return
    with os.scandir(new.directory) as entries:
        names = [entry.name for entry in entries]
    if len(_unlisted) >= _MAX_KNOWN:
        _unlisted.clear()
    _unlisted[known] = len(names) // _LISTED_ENTRIES
    for name in names:
        if TEMPORARY_NAME.fullmatch(name) and name not in _own_names:
            # Another user's file, for example, stays.
            with contextlib.suppress(OSError):
                _remove_if_abandoned(new, name)


def _remove_if_abandoned(new: Temporary, name: str) -> None:
    # The type is checked first, because to open a device may have an effect.
    if not stat.S_ISREG(os.stat(name, dir_fd=new.directory, follow_symlinks=False).st_mode):
        return
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=new.directory)
    try:
        # A shared lock needs only the right to read, and excludes the writer's lock like an exclusive one.
        is_unlocked = _lock(descriptor, fcntl.F_RDLCK)
        if is_unlocked is False:
            return
        # Both times are the file system's: the clock of its server may differ from ours.
        pause = os.fstat(new.descriptor).st_mtime - os.fstat(descriptor).st_mtime
        if (is_unlocked and new.is_local) or pause > _MAX_PAUSE_SECONDS:
            # If the writer has renamed the file meanwhile, it has no such name any more.
            os.unlink(name, dir_fd=new.directory)
    finally:
        os.close(descriptor)


def write_temporary(path: Path, *parts: bytes, sync: bool) -> None:
    """Write a small temporary file for a later :func:`rename`; if this fails, the file is removed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with remove_on_error(path), open(os.open(path, flags, 0o666), "wb", buffering=0) as file:
        _write_all(file.fileno(), parts, sync)


def _write_all(descriptor: int, parts: Iterable[bytes], sync: bool) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(descriptor, view) :]
    if sync:
        os.fsync(descriptor)


@contextlib.contextmanager
def remove_on_error(path: Path) -> Iterator[None]:
    """Remove a file if the block raises."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the original error matters more
            path.unlink()
        raise


def rename(source: AnyPath, target: AnyPath, *, directory: int | None = None) -> None:
    """Rename a file to ``target``, and replace an existing file there; both may be relative to an open ``directory``.

    On FUSE, retry for 2 seconds, and at least 100 times, if the file is still open: the kernel notifies the FUSE server
    of a close(2) asynchronously (RELEASE).
    """
    deadline = time.monotonic() + _STILL_OPEN_SECONDS
    for attempt in itertools.count(1):
        try:
            os.replace(source, target, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            late = error.errno not in _STILL_OPEN or (
                attempt >= _STILL_OPEN_ATTEMPTS and time.monotonic() > deadline
            )
            where = Path(os.fsdecode(target)).parent
            if directory is not None:
                where = Path(f"{OWN_FILES}/{directory}") / "."
            if late or not ((mount := mount_or_none(where)) and mount["type"].startswith("fuse")):
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


# File systems that passed the rename test, each with whether the test replaced an existing file. Not only by the device
# number, which is given to another file system after an unmount.
_renames_checked: set[tuple[str, ...]] = set()


def check_renames(directory: Path, *, replaced: bool) -> None:
    """Test whether files can be renamed in a directory, once for each file system.

    Parameters
    ----------
    directory : Path
        An existing directory.
    replaced : bool
        Whether to test a rename that replaces an existing file.

    Raises
    ------
    StorageError
        Files cannot be renamed or created there.
    """
    mount = mount_or_none(directory)
    checked = (*(mount or {}).values(), str(replaced))
    if mount is not None and checked in _renames_checked:
        return
    with storage_errors(directory), Temporary(directory) as new, Temporary(directory) as old:
        name = old.name if replaced else new_name()
        old.close()
        try:
            new.rename(name)
        except OSError as error:
            what = "rename a file over an existing one" if replaced else "rename a file"
            message = (
                f"{error.strerror}: this file system cannot {what}, so an interrupted save would leave an incomplete "
                "file (remedy: save to another file system, and copy the complete file)"
            )
            raise StorageError(error.errno, message, str(directory)) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=new.directory)
    if len(_renames_checked) >= _MAX_KNOWN:
        _renames_checked.clear()
    _renames_checked.add(checked)


def make_directory(directory: Path, *, sync: bool = True) -> list[Path]:
    """Create a directory and its missing parents, and return the directories in which names were created.

    With ``sync`` the new names are durable.
    """
    missing: list[Path] = []
    existing = directory
    while not existing.exists():
        missing.append(existing)
        existing = existing.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        try:
            if sync:
                sync_directory(path.parent)
        except BaseException:
            # Otherwise the next call would find the directory and assume that its name is durable.
            with contextlib.suppress(OSError):
                path.rmdir()
            raise
    return [path.parent for path in reversed(missing)]


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        sync_open_directory(descriptor)
    finally:
        os.close(descriptor)


def sync_open_directory(directory: int) -> None:
    """Make the names in an open directory durable."""
    try:
        os.fsync(directory)
    except OSError as error:
        # On these file systems fsync() of a directory is not supported, and there is no other way to make names
        # durable.
        if error.errno not in _NO_SYNC:
            raise


def sync_file(path: Path) -> None:
    """Make a file's data durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unlink(paths: Iterable[Path]) -> None:
    """Remove files, and ignore those that do not exist."""
    for path in paths:
        path.unlink(missing_ok=True)

"""Atomic and durable names: write small temporary files, rename files, create and sync directories.

:mod:`tensorferry.transfer.replacement` writes large files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.base.mounts import mount_or_none
from tensorferry.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import FileIO

    from tensorferry.base.checks import Path as AnyPath

# Errors of fsync() on file systems that cannot sync a directory; the core has the same list.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
# Errors of rename() that FUSE may return for an open file. FUSE may consider a file open for a while after close(2).
_STILL_OPEN = (errno.EPERM, errno.EACCES, errno.EBUSY, errno.EOPNOTSUPP, errno.ETXTBSY)
_STILL_OPEN_SECONDS = 2.0
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


def new_name() -> str:
    """Return a random name for a temporary file. It has 64 random bits, so no other file has this name."""
    return f".tensorferry-{secrets.token_hex(8)}.tmp"


def write_temporary(path: Path, *parts: bytes, sync: bool) -> None:
    """Write a small temporary file for a later :func:`rename`; if this fails, the file is removed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with remove_on_error(path), open(os.open(path, flags, 0o666), "wb", buffering=0) as file:
        for part in parts:
            _write_all(file, part)
        if sync:
            os.fsync(file.fileno())


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


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

    On FUSE, retry for up to 2 seconds if the file is still open: the kernel notifies the FUSE server of a close(2)
    asynchronously (RELEASE).
    """
    deadline = time.monotonic() + _STILL_OPEN_SECONDS
    while True:
        try:
            os.replace(source, target, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            late = error.errno not in _STILL_OPEN or time.monotonic() > deadline
            where = Path(os.fsdecode(target)).parent
            if directory is not None:
                where = Path(f"{OWN_FILES}/{directory}") / "."
            if late or not ((mount := mount_or_none(where)) and mount["type"].startswith("fuse")):
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


# File systems (device numbers) that passed the rename test, each with whether the test replaced an existing file.
_renames_checked: set[tuple[int, bool]] = set()


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
    with storage_errors(directory):
        _check_renames(directory, replaced=replaced)


def _check_renames(directory: Path, *, replaced: bool) -> None:
    device = directory.stat().st_dev
    if (device, replaced) in _renames_checked:
        return
    names = [new_name() for _ in range(2)]
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[: 1 + replaced]:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=descriptor))
        try:
            rename(*names, directory=descriptor)
        except OSError as error:
            what = "rename a file over an existing one" if replaced else "rename a file"
            message = (
                f"{error.strerror}: this file system cannot {what}, so an interrupted save would leave an incomplete "
                "file (remedy: save to another file system, and copy the complete file)"
            )
            raise StorageError(error.errno, message, str(directory)) from None
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=descriptor)
        os.close(descriptor)
    _renames_checked.add((device, replaced))


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

"""Names: files get one, and take that of another, atomically and durably; directories are made and synced.

:mod:`tensorferry.transfer.replacement` writes files of any size without a name first; small ones are written here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.base.mounts import mount_if_seen
from tensorferry.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import FileIO

    from tensorferry.base.checks import Path as AnyPath

# What fsync() of a directory says where there is none, as for the core.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
# What FUSE may say of a file that is still open, which it can be for a while after close(2).
_STILL_OPEN = (errno.EPERM, errno.EACCES, errno.EBUSY, errno.EOPNOTSUPP, errno.ETXTBSY)
_STILL_OPEN_SECONDS = 2.0
_POLL_SECONDS = 0.002
_OWN_FILES = "/proc/self/fd"


@contextlib.contextmanager
def storage_errors(path: AnyPath, what: str = "") -> Iterator[None]:
    """Raise what Python's own calls for names raise as a StorageError of a path, which says what was being done."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"{reason} ({what})" if what else reason
        raise StorageError(error.errno, message, os.fsdecode(path)) from None


def new_name() -> str:
    """Return a name that no file has."""
    return f".tensorferry-{secrets.token_hex(8)}.tmp"


def write_temporary(path: Path, *parts: bytes, sync: bool) -> None:
    """Write a small file that is to get another name by :func:`rename`; where this fails, nothing is there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with removed_if_it_fails(path), open(os.open(path, flags, 0o666), "wb", buffering=0) as file:
        for part in parts:
            _write_all(file, part)
        if sync:
            os.fsync(file.fileno())


def _write_all(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


@contextlib.contextmanager
def removed_if_it_fails(path: Path) -> Iterator[None]:
    """Remove a file where the block raises."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # what failed before is what matters
            path.unlink()
        raise


def rename(source: AnyPath, target: AnyPath, *, directory: int | None = None) -> None:
    """Give a file another name, in the place of what has it; both may be in an open directory.

    On FUSE what has just been closed may count as open for a while: the kernel tells the server later.
    """
    deadline = time.monotonic() + _STILL_OPEN_SECONDS
    while True:
        try:
            os.replace(source, target, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            late = error.errno not in _STILL_OPEN or time.monotonic() > deadline
            where = Path(os.fsdecode(target)).parent
            if directory is not None:
                where = Path(f"{_OWN_FILES}/{directory}") / "."
            if late or not ((mount := mount_if_seen(where)) and mount["type"].startswith("fuse")):
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return


# Directories' devices where renaming has been tried, and whether what is replaced was there.
_renaming: set[tuple[int, bool]] = set()


def check_renames(directory: Path, *, replaced: bool) -> None:
    """Try whether files can be renamed in a directory, once for each file system.

    Parameters
    ----------
    directory : Path
        Where; it exists.
    replaced : bool
        Whether another one has the name.

    Raises
    ------
    StorageError
        They cannot, or nothing can be made there.
    """
    with storage_errors(directory):
        _check_renames(directory, replaced=replaced)


def _check_renames(directory: Path, *, replaced: bool) -> None:
    device = directory.stat().st_dev
    if (device, replaced) in _renaming:
        return
    names = [new_name() for _ in range(2)]
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[: 1 + replaced]:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=descriptor))
        try:
            rename(*names, directory=descriptor)
        except OSError as error:
            what = "replace a file by another" if replaced else "rename a file"
            message = (
                f"{error.strerror}: this file system cannot {what}, so that a save that is stopped would leave half "
                "a file (remedy: save elsewhere, and copy what is complete)"
            )
            raise StorageError(error.errno, message, str(directory)) from None
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=descriptor)
        os.close(descriptor)
    _renaming.add((device, replaced))


def make_directory(directory: Path, *, sync: bool = True) -> list[Path]:
    """Make a directory and its parents where they are missing; return in which directories that made names.

    With ``sync`` they would survive a power cut.
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
            # The next call would take it for one that is durable.
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
        # Some file systems have no fsync for directories, and then nothing that it could add.
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
    """Remove files, those of them that are there."""
    for path in paths:
        path.unlink(missing_ok=True)

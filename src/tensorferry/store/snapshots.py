"""The directories of a snapshot in progress, and links in them to the store's files.

A snapshot is made in a temporary directory that is renamed at the end, so a directory with the final name is always
complete. Until then, a lock on the directory shows that a process is using it. The next snapshot next to it removes
temporary directories without a lock, which killed processes have left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.base.file_locks import lock_directory
from tensorferry.errors import StorageError
from tensorferry.store.folder import Folder
from tensorferry.transfer.publication import (
    OWN_FILES,
    make_directory,
    rename,
    storage_errors,
    sync_directory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorferry.store.segments import Segment

# linux/fs.h
_FICLONE = 0x40049409
_PARTIAL = re.compile(r"\.tensorferry\.[0-9a-f]{16}\.[0-9a-f]{8}\.partial", re.ASCII)


@contextlib.contextmanager
def unfinished(paths: Sequence[str], run: str) -> Iterator[list[Folder]]:
    """Make temporary directories for the block, and give them their final names at its end.

    If the block raises, or the directories cannot get their names, they are removed.

    Raises
    ------
    StorageError
        A path exists (EEXIST), or a directory cannot be created, made durable or renamed.
    """
    pairs: list[tuple[Path, Path]] = []  # the temporary and the final path
    folders: list[Folder] = []
    made_in: list[Path] = []
    with storage_errors(paths[0], "making a snapshot"):
        for path in map(Path, paths):
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        try:
            for path in map(Path, paths):
                _remove_leftovers(path.parent)
                # Another process may remove a directory as a leftover before it is locked. Then create another one.
                while len(folders) == len(pairs):
                    name = f".tensorferry.{run}.{os.urandom(4).hex()}.partial"
                    pairs.append((path.with_name(name), path))
                    made_in += make_directory(pairs[-1][0], sync=False)
                    with contextlib.suppress(FileNotFoundError):
                        folder = Folder(str(pairs[-1][0]))
                        if _lock(folder) is not False:
                            folders.append(folder)
                            break
                    pairs.pop()
            yield folders
            for folder in folders:
                folder.sync()
            # The directory with the manifest is renamed last, so the snapshot exists only once all directories do.
            for temporary, path in reversed(pairs):
                rename(temporary, path)
            for directory in dict.fromkeys(made_in):
                sync_directory(directory)
        except BaseException:
            for number, (temporary, path) in enumerate(pairs):
                # An interrupt may have followed the last rename.
                with contextlib.suppress(OSError):
                    if number < len(folders) and folders[number].is_at(str(path)):
                        rename(path, temporary)
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            for folder in folders:
                folder.release()


def link(segment: Segment, folder: Folder, name: str) -> bool:
    """Create a hard link to a segment, or a reflink. Return False if neither is possible."""
    file = segment.open()
    try:
        # Linking a file through its descriptor needs linkat(2) with AT_SYMLINK_FOLLOW on the /proc link. Python calls
        # linkat() only if a directory descriptor is given.
        source = f"{OWN_FILES}/{file.descriptor}"
        os.link(source, name, dst_dir_fd=folder.descriptor, follow_symlinks=True)
        return True
    except OSError:
        # Possible causes: the snapshot is on another file system, the file system does not support hard links, the file
        # has too many of them, or its link count has dropped to 0.
        pass
    try:
        with folder.opened(name, os.O_RDWR | os.O_CREAT | os.O_EXCL) as clone:
            fcntl.ioctl(clone, _FICLONE, file.descriptor)
            os.fsync(clone)
            return True
    except StorageError:
        folder.unlink(name)
        return False


def _lock(folder: Folder) -> bool | None:
    """Lock a temporary directory. Return False if another process has the lock, or has removed the directory."""
    locked = lock_directory(folder.descriptor)
    return locked if folder.is_at(folder.path) else False


def _remove_leftovers(directory: Path) -> None:
    """Remove temporary directories of snapshots that no process has locked."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):  # noqa: PTH208
            if _PARTIAL.fullmatch(name):
                with contextlib.suppress(OSError):
                    folder = Folder(str(directory / name))
                    if _lock(folder):
                        shutil.rmtree(directory / name, ignore_errors=True)
                    folder.release()

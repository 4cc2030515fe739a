"""The files of a snapshot: hard links to segments where possible, otherwise reflinks (shared blocks), otherwise copies.

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

from tensorferry import _core
from tensorferry.base.file_locks import lock_directory
from tensorferry.store import folder
from tensorferry.store import manifest as manifests
from tensorferry.store.segments import Extent, Piece, Segment
from tensorferry.store.transfers import CHUNK_NBYTES, Copier
from tensorferry.transfer.publication import rename, storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


# linux/fs.h
_FICLONE = 0x40049409

_PARTIAL = re.compile(r"\..*\.[0-9a-f]{16}\.[0-9a-f]{8}\.partial", re.ASCII | re.DOTALL)


_MAKING = "making a snapshot"


class UnfinishedSnapshot:
    """The temporary directories of a snapshot in progress. :meth:`finish` completes it, :meth:`remove` undoes it."""

    def __init__(self, paths: Sequence[str], run: str) -> None:
        self._run = run
        self._paths = [Path(path) for path in paths]
        self._partial: list[Path] = []
        self._locks: list[_Lock] = []
        self._made_in: list[str] = []
        self._copier: Copier | None = None
        for path in self._paths:
            with storage_errors(path, _MAKING), contextlib.suppress(FileNotFoundError):
                path.lstat()
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        try:
            for path in self._paths:
                with storage_errors(path, _MAKING):
                    _remove_leftovers(path.parent)
                    self._make(path)
        except BaseException:
            self.remove()
            raise

    def _make(self, path: Path) -> None:
        # Another process may remove the directory as a leftover before it is locked. In this case, create another one.
        while True:
            partial = path.with_name(f".tensorferry.{self._run}.{os.urandom(4).hex()}.partial")
            self._partial.append(partial)
            self._made_in += folder.make_directory(str(partial))
            with contextlib.suppress(FileNotFoundError):
                lock = _Lock(partial)
                # The lock counts only if the directory still has this name.
                has_name = os.path.samestat(os.fstat(lock.descriptor), partial.stat())
                if lock.held is not False and has_name:
                    self._locks.append(lock)
                    return
            self._partial.pop()

    def link(self, segment: Segment, directory: int, name: str) -> bool:
        """Create a hard link to a segment, or a reflink. Return False if neither is possible."""
        path = self._partial[directory] / name
        source = f"/proc/self/fd/{segment.file.descriptor}"
        try:
            parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Linking a file through its descriptor needs linkat(2) with AT_SYMLINK_FOLLOW on the /proc link. Python
                # calls linkat() only if a directory descriptor is given.
                os.link(source, name, dst_dir_fd=parent, follow_symlinks=True)
            finally:
                os.close(parent)
            return True
        except OSError:
            # Possible causes: the snapshot is on another file system, the file system does not support hard links, the
            # file has too many of them, or its link count has dropped to 0.
            pass
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(path, flags, 0o666), "r+b") as file:
                fcntl.ioctl(file.fileno(), _FICLONE, segment.file.descriptor)
                os.fsync(file.fileno())
            return True
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def copy(
        self,
        segment: Segment,
        pieces: Iterable[tuple[Piece, Sequence[int] | None]],
        directory: int,
        name: str,
    ) -> None:
        """Copy pieces of a segment to a new file of the same size, at the same offsets, and verify their checksums."""
        path = os.fspath(self._partial[directory] / name)
        file = _core.open_file(path, False, True, True, True, False, "auto")
        file.truncate(segment.nbytes)
        target = Segment(segment.directory, -1, file, segment.nbytes, name)
        self._copier = self._copier or Copier()
        for piece, sums in pieces:
            extent = Extent(target, piece.offset, piece.nbytes)
            self._copier.copy(piece, sums, CHUNK_NBYTES, Piece(extent))
        self._copier.finish()
        file.sync()
        file.close()

    def finish(self, manifest: bytes) -> None:
        """Write the manifest, make everything durable, and rename the directories to their final names."""
        partial = [str(path) for path in self._partial]
        folder.write_file(partial[0], manifests.NAME, manifest, self._run, sync=True)
        for directory in partial:
            folder.sync_directory(directory)
        # The directory with the manifest is renamed last, so the snapshot exists only once all directories do.
        pairs = list(zip(self._partial, self._paths, strict=True))
        begun: list[tuple[Path, Path]] = []
        try:
            with storage_errors(self._paths[0], _MAKING):
                for temporary, path in reversed(pairs):
                    begun.append((temporary, path))
                    rename(temporary, path)
                for made_in in dict.fromkeys(self._made_in):
                    folder.sync_directory(made_in)
        except BaseException:
            for temporary, path in reversed(begun):
                # The last rename may have failed, or an interrupt may have followed it.
                if not temporary.exists():
                    rename(path, temporary)
            raise
        self._locks.clear()

    def remove(self) -> None:
        """Remove the temporary directories. After :meth:`finish`, this has no effect."""
        for path in self._partial:
            shutil.rmtree(path, ignore_errors=True)
        self._locks.clear()


class _Lock:
    """A lock on a directory (flock(2)), which is released when this object is deleted.

    ``held`` is False if another process has the lock, and None if the file system does not support such locks.
    """

    def __init__(self, directory: Path) -> None:
        self.descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.held = lock_directory(self.descriptor)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _remove_leftovers(directory: Path) -> None:
    """Remove temporary directories of snapshots that no process has locked."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):  # noqa: PTH208
            if _PARTIAL.fullmatch(name):
                with contextlib.suppress(OSError):
                    lock = _Lock(directory / name)
                    if lock.held:
                        shutil.rmtree(directory / name, ignore_errors=True)

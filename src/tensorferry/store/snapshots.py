"""Files of a snapshot: second names of segments where that is possible, else files that share their blocks, or copies.

They are made in a directory that gets its name at the end, so that what has the name is whole. A lock on the directory
says until then that somebody makes it: what a dead snapshot has left is removed by the next one beside it.
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


class Partial:
    """The directories of a snapshot that is being made; without ``finish`` nothing stays."""

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
        # Whoever looks for leftovers between the first two lines takes it for one: then another is made.
        while True:
            partial = path.with_name(f".tensorferry.{self._run}.{os.urandom(4).hex()}.partial")
            self._partial.append(partial)
            self._made_in += folder.make_directory(str(partial))
            with contextlib.suppress(FileNotFoundError):
                lock = _Lock(partial)
                # Whether the directory still has this name.
                is_there = os.path.samestat(os.fstat(lock.descriptor), partial.stat())
                if lock.held is not False and is_there:
                    self._locks.append(lock)
                    return
            self._partial.pop()

    def link(self, segment: Segment, directory: int, name: str) -> bool:
        """Give a segment a second name, or share its blocks; False where neither can be done."""
        path = self._partial[directory] / name
        source = f"/proc/self/fd/{segment.file.descriptor}"
        try:
            parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Only linkat() follows the link in /proc, and only it takes descriptors of directories.
                os.link(source, name, dst_dir_fd=parent, follow_symlinks=True)
            finally:
                os.close(parent)
            return True
        except OSError:
            pass  # another file system, no links, too many, or all names of an unnamed file have gone again
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
        wanted: Iterable[tuple[Piece, Sequence[int] | None]],
        directory: int,
        name: str,
    ) -> None:
        """Copy pieces of a segment, verified, into a file of its size."""
        path = os.fspath(self._partial[directory] / name)
        file = _core.open_file(path, False, True, True, True, False, "auto")
        file.truncate(segment.nbytes)
        target = Segment(segment.directory, -1, file, segment.nbytes, name)
        self._copier = self._copier or Copier()
        for piece, sums in wanted:
            place = Extent(target, piece.offset, piece.nbytes)
            self._copier.copy(piece, sums, CHUNK_NBYTES, Piece(place))
        self._copier.finish()
        file.sync()
        file.close()

    def finish(self, manifest: bytes) -> None:
        """Make all of it durable, and give it its name."""
        partial = [str(path) for path in self._partial]
        folder.write_file(partial[0], manifests.NAME, manifest, self._run, sync=True)
        for directory in partial:
            folder.sync_directory(directory)
        # The manifest's directory is the last one: what has its name is whole.
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
                if not temporary.exists():
                    rename(path, temporary)
            raise
        self._locks.clear()

    def remove(self) -> None:
        """Remove what has been made; of a snapshot that is finished nothing is."""
        for path in self._partial:
            shutil.rmtree(path, ignore_errors=True)
        self._locks.clear()


class _Lock:
    """A lock on a directory (flock(2)), until this object goes; None in ``held`` where there are no such locks."""

    def __init__(self, directory: Path) -> None:
        self.descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.held = lock_directory(self.descriptor)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _remove_leftovers(directory: Path) -> None:
    """Remove directories of snapshots that nobody makes any more."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):  # noqa: PTH208
            if _PARTIAL.fullmatch(name):
                with contextlib.suppress(OSError):
                    lock = _Lock(directory / name)
                    if lock.held:
                        shutil.rmtree(directory / name, ignore_errors=True)

"""A new file that takes the place of another when it is whole, at one stroke.

Until then it has no name, where the file system knows such files (O_TMPFILE): whatever ends the process, nothing is
left behind. Elsewhere (NFS, for one) it has a temporary name beside its later one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import tensorferry
from tensorferry import _core
from tensorferry.checkpoint.pipeline import Pipeline
from tensorferry.checkpoint.stream import Stream
from tensorferry.transfers import checked_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from tensorferry.transfers import Path as AnyPath

# What file systems without nameless files say.
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
# What fsync() of a directory says where there is none, as for the core.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


class Replacement:
    """A context manager: the file takes its place at the end of the block, or not at all if that raises.

    Parameters
    ----------
    path : str, bytes or PathLike
        The place; a symbolic link is followed. The permissions of what is there are kept.
    sync : bool
        Whether the file will survive a power cut.
    reserve_nbytes : int
        Space to reserve at once.

    Raises
    ------
    ValueError
        What is at the path is no regular file.
    StorageError, OSError
        The file cannot be made, or there is no space for it.

    Attributes
    ----------
    stream : Stream
        To write the file with.
    target : str
        The path that it will have.
    """

    def __init__(self, path: AnyPath, *, sync: bool, reserve_nbytes: int = 0) -> None:
        target = Path(checked_path(path)).resolve()
        mode = _mode_of(target)
        self.target = str(target)
        self._last_name = target.name
        self._name: str | None = None  # what it is called for now, in the directory
        self._sync = sync
        self._generation = _core.fork_generation()
        with contextlib.ExitStack() as undo:
            self._directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, self._directory)
            undo.callback(self._remove)
            self._descriptor = self._create()
            undo.callback(os.close, self._descriptor)
            if mode is not None:
                os.fchmod(self._descriptor, mode)
            self._own_path = f"/proc/self/fd/{self._descriptor}"
            pipeline = undo.enter_context(Pipeline())
            with self.named():
                file = tensorferry.open(self._own_path, "r+")
                self.stream = Stream(file, pipeline, reserve_nbytes=reserve_nbytes)
            self._undo = undo.pop_all()

    def commit(self) -> None:
        """Finish the file, let it take its place, and close.

        Raises
        ------
        StorageError, OSError
            Not everything could be written, made durable, or put in place. What was there has stayed, unless it is
            only the new file's name that could not be made durable.
        """
        with self._undo:
            try:
                with self.named():
                    self.stream.finish(self._sync)
                self._take_place()
            except BaseException:
                self._give_up()
                raise

    def abort(self) -> None:
        """Give the file up, and close: what was there stays."""
        with self._undo:
            self._give_up()

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Let failures in the block name the path that was asked for."""
        try:
            yield
        except OSError as error:
            error.filename = self.target
            raise

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def _create(self) -> int:
        """Return the descriptor of a new file."""
        flags, at = os.O_RDWR | os.O_CLOEXEC, self._directory
        try:
            return os.open(".", flags | os.O_TMPFILE, 0o666, dir_fd=at)
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
        self._name = _new_name()
        return os.open(self._name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=at)

    def _take_place(self) -> None:
        directory = self._directory
        if self._name is None:
            # No name may be in the way of link(), so the old one is not given at once. With a directory given, link()
            # follows the symbolic link that /proc shows.
            self._name = _new_name()
            os.link(self._own_path, self._name, src_dir_fd=directory, dst_dir_fd=directory)
        os.replace(self._name, self._last_name, src_dir_fd=directory, dst_dir_fd=directory)
        self._name = None
        if self._sync:
            sync_names(directory)

    @property
    def is_parents(self) -> bool:
        """Whether this is a forked child: it may close what it has inherited, no more."""
        return self._generation != _core.fork_generation()

    def _give_up(self) -> None:
        if self.is_parents:
            return
        self.stream.abort()
        # An exception's traceback may keep the file open for long; its space is wanted now. Nothing is cut that has a
        # name: it may be the one that was asked for.
        with contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_nlink == 0:
                os.ftruncate(self._descriptor, 0)

    def _remove(self) -> None:
        if self._name is not None and not self.is_parents:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=self._directory)


def sync_names(directory: int) -> None:
    """Make the names in a directory durable."""
    try:
        os.fsync(directory)
    except OSError as error:
        # Some file systems have no fsync for directories, and then nothing that it could add.
        if error.errno not in _NO_SYNC:
            raise


def _mode_of(path: Path) -> int | None:
    """Return the permissions of the file that is to be replaced, None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"path: {str(path)!r} is no regular file")
    return stat.S_IMODE(status.st_mode)


def _new_name() -> str:
    return f".tensorferry-{secrets.token_hex(8)}.tmp"

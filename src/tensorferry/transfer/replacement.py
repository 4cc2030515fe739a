"""A new file that takes the place of another when it is whole, at one stroke.

Until then it has no name, where the file system knows such files (O_TMPFILE): whatever ends the process, nothing is
left behind. Elsewhere (NFS, for one, or without /proc) it has a temporary name beside its later one. FUSE file systems
of object stores may refuse permissions, a second descriptor, or to rename what is open: none of that is needed. They
must be able to rename a file, and that is tried before data are written.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import stat
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import kept_path
from tensorferry.base.processes import Owned
from tensorferry.errors import StorageError, first_of
from tensorferry.transfer.files import File
from tensorferry.transfer.new_file import NewFile
from tensorferry.transfer.publication import (
    check_renames,
    new_name,
    rename,
    storage_errors,
    sync_directory,
    sync_open_directory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from tensorferry.base.checks import Direct
    from tensorferry.base.checks import Path as AnyPath
    from tensorferry.transfer.checksums import Checksums
    from tensorferry.transfer.files import Priority
    from tensorferry.transfer.futures import Future

# What file systems without nameless files say.
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
# Nothing is called so, or no file, or nothing can be: a longer name than the file system takes.
_NOT_BESIDE = (errno.ENOENT, errno.EISDIR, errno.ENAMETOOLONG)

# Whole files that are written beside each other. Each has three descriptors, so that fewer may be possible.
_TOGETHER = 16
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)

# What file systems say that have no permissions, or keep them to themselves.
_NO_PERMISSIONS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_ACL = "system.posix_acl_access"
_OWN_FILES = "/proc/self/fd"

# How often a path is looked up twice before it is believed that the two are not the same file: others may be replacing
# it between the two.
_LOOKS_MAX = 100


class Target(Owned, abc.ABC):
    """A path, and the file that is to have it; :class:`Replacement` and :class:`WholeFile` say how it is written.

    A context manager: the file takes its place at the end of the block, or not at all if that raises.

    Parameters
    ----------
    path : str, bytes or PathLike
        The place; a symbolic link is followed. Owner, group, permissions and POSIX ACL of what is there are kept, as
        far as this process may give them; where it may not, nobody else gets a right that he had not.
    sync : bool
        Whether the file will survive a power cut.
    beside_suffix : str
        A file that is called as this one, with this behind it, tells of the old one: it goes with it.

    Raises
    ------
    ValueError
        What is at the path is no regular file, or has no name any more.
    StorageError, OSError
        The file cannot be made.

    Attributes
    ----------
    target : str
        The path that it will have.
    """

    def __init__(self, path: AnyPath, *, sync: bool, beside_suffix: str = "") -> None:
        target, old = _found(path)
        self.target = str(target)
        self._beside: set[Path] = set()
        if beside_suffix:
            asked = Path(os.fsdecode(path))
            by_either_name = (asked.parent.resolve() / asked.name, target)
            self._beside = {each.with_name(each.name + beside_suffix) for each in by_either_name}
        self._last_name = target.name
        self._name: str | None = None  # what it is called for now, in the directory
        self._own_path = self._linked = ""
        self._sync = sync
        self._finished = False
        self._belong_here()
        self._directory = self._descriptor = -1
        self._opened = False
        try:
            with self.named():
                self._make(target, old)
        except BaseException:
            self._let_go()
            raise

    def _make(self, target: Path, old: os.stat_result | None) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._directory = os.open(str(target.parent), flags)
        # Nobody else may open it before it has the old one's permissions.
        self._descriptor = self._create(0o666 if old is None else 0o600)
        if old is not None:
            _keep_rights(self._descriptor, self.target, old)
        self._own_path = f"{_OWN_FILES}/{self._descriptor}"
        try:  # what the core calls it in failures: without /proc that is its number
            self._linked = os.readlink(self._own_path)  # noqa: PTH115
        except OSError:
            self._linked = f"descriptor {self._descriptor}"
        self._open()
        self._opened = True

    @abc.abstractmethod
    def _open(self) -> None:
        """Open ``_descriptor`` for writing."""

    @abc.abstractmethod
    def _finish(self) -> None:
        """Write what is left, make it durable where that was asked for, and close."""

    @abc.abstractmethod
    def _abort(self) -> None:
        """Close what was opened, when nothing is being written to it any more."""

    def finish(self) -> None:
        """Write what is left; with ``sync`` its data is durable then. :meth:`commit` has only the name to give."""
        with self.named():
            self._finish()
        self._finished = True

    def commit(self, *, sync_names: bool = True) -> None:
        """Finish the file, let it take its place, and close; without ``sync_names`` the caller makes its name durable.

        Raises
        ------
        StorageError, OSError
            Not everything could be written, made durable, or put in place. What was there has stayed, unless it is
            only the new file's name that could not be made durable.
        """
        try:
            if not self._finished:
                self.finish()
            with self.named():
                self._take_place(sync_names=sync_names)
        except BaseException:
            self._give_up()
            raise
        finally:
            self._let_go()

    def abort(self) -> None:
        """Give the file up, and close: what was there stays. After an end nothing is done."""
        try:
            self._give_up()
        finally:
            self._let_go()

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Let failures of this file in the block name the path that it will have."""
        try:
            yield
        except OSError as error:
            directory = str(Path(self.target).parent)
            own = (self._own_path, self._linked, self._name)
            if error.filename in (None, ".", directory, *own):
                error.filename = self.target
                if error.filename2 is not None:
                    del error.filename2
            raise

    def __del__(self) -> None:
        if getattr(self, "_directory", -1) >= 0:
            self.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def _create(self, mode: int) -> int:
        """Return the descriptor of a new file."""
        flags, at = os.O_RDWR | os.O_CLOEXEC, self._directory
        # Without /proc a file without a name cannot be opened again, or get one.
        if Path(_OWN_FILES).exists():
            try:
                return os.open(".", flags | os.O_TMPFILE, mode, dir_fd=at)
            except OSError as error:
                if error.errno not in _NO_NAMELESS_FILES:
                    raise
        check_renames(Path(self.target).parent, replaced=Path(self.target).exists())
        self._name = new_name()
        return os.open(self._name, flags | os.O_CREAT | os.O_EXCL, mode, dir_fd=at)

    def _take_place(self, *, sync_names: bool) -> None:
        directory = self._directory
        if self._name is not None:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
        else:
            # No name may be in the way of link(), so the old one is not given at once. With a directory given, link()
            # follows the symbolic link that /proc shows.
            self._name = new_name()
            os.link(self._own_path, self._name, src_dir_fd=directory, dst_dir_fd=directory)
            if self._sync:
                # That it has a name at all: ext2, which has no journal, would call the file deleted.
                os.fsync(self._descriptor)
        # Before: nobody may find the new file beside what tells of the old one, after a power cut neither.
        for path in self._remove_beside():
            if self._sync:
                sync_directory(path.parent)
        rename(self._name, self._last_name, directory=directory)
        self._name = None
        self._remove_beside()  # somebody may have written one meanwhile
        if self._sync and sync_names:
            sync_open_directory(directory)

    def _remove_beside(self) -> list[Path]:
        removed = []
        for path in self._beside:
            try:
                path.unlink()
                removed.append(path)
            except OSError as error:
                if error.errno not in _NOT_BESIDE:
                    raise
        return removed

    def _give_up(self) -> None:
        if self.is_parents or not self._opened:
            return
        self._abort()
        # An exception's traceback may keep the file open for long; its space is wanted now. Nothing is cut that has a
        # name: it may be the one that was asked for.
        with contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_nlink == 0:
                os.ftruncate(self._descriptor, 0)

    def _let_go(self) -> None:
        # Who lets go a second time finds nothing.
        descriptor, self._descriptor = self._descriptor, -1
        directory, self._directory = self._directory, -1
        try:
            if descriptor >= 0:
                os.close(descriptor)
            if directory >= 0 and self._name is not None and not self.is_parents:
                with contextlib.suppress(OSError):  # what failed before is what matters
                    os.unlink(self._name, dir_fd=directory)
        finally:
            if directory >= 0:
                os.close(directory)


class Replacement(Target):
    """A place whose file is written in order, by a stream; see :class:`Target`.

    Parameters
    ----------
    path, sync, beside_suffix
        As for :class:`Target`.
    reserve_nbytes : int
        Space to reserve at once.
    checksums : Checksums, optional
        Which to take of what is written.

    Raises
    ------
    ValueError, StorageError, OSError
        As for :class:`Target`; or there is no space for it.

    Attributes
    ----------
    file : NewFile
        To write to.
    """

    file: NewFile

    def __init__(
        self,
        path: AnyPath,
        *,
        sync: bool,
        reserve_nbytes: int = 0,
        checksums: Checksums | None = None,
        beside_suffix: str = "",
    ) -> None:
        self._reserve_nbytes = reserve_nbytes
        self._checksums = checksums
        super().__init__(path, sync=sync, beside_suffix=beside_suffix)

    def _open(self) -> None:
        self.file = NewFile(
            File._of_descriptor(self._descriptor),
            reserve_nbytes=self._reserve_nbytes,
            checksums=self._checksums,
        )

    def _finish(self) -> None:
        self.file.finish(self._sync)

    def _abort(self) -> None:
        self.file.abort()


class WholeFile(Target):
    """A place whose file is written by one transfer, durable before the file has the name; see :class:`Target`."""

    file: File

    def __init__(self, path: AnyPath, *, direct: Direct) -> None:
        self._direct = direct
        super().__init__(path, sync=True)

    def _open(self) -> None:
        self.file = File._of_descriptor(self._descriptor, direct=self._direct)

    def _finish(self) -> None:
        self.file.close()

    def _abort(self) -> None:
        self.file.close()


def write_whole(
    items: Sequence[tuple[AnyPath, Any]],
    *,
    sync: bool,
    direct: Direct,
    priority: Priority,
    checksums: Checksums | None = None,
) -> None:
    """Let each of several files be one array, or several, at one stroke; their data is durable before.

    Parameters
    ----------
    items
        Paths, all different, and arrays that were checked.
    sync : bool
        Return only when the names are durable, too.
    direct, priority, checksums
        As for :func:`tensorferry.write`.

    Raises
    ------
    StorageError
        The failure of the first that failed, which knows the others. What was there has stayed then; files that did not
        fail have taken their places.
    """
    for path, _ in items:
        with contextlib.suppress(OSError):  # found again when it is the file's turn
            _found(path)
    failures: list[StorageError] = []
    remaining = deque(items)
    while remaining:
        with contextlib.ExitStack() as to_close:
            writing: list[tuple[AnyPath, WholeFile, Future[Any]]] = []
            while remaining and len(writing) < _TOGETHER:
                path, array = remaining.popleft()
                with _collected(failures, path):
                    try:
                        place = WholeFile(path, direct=direct)
                    except OSError as error:
                        if writing and error.errno in _TOO_MANY_FILES:
                            remaining.appendleft((path, array))
                            break
                        raise
                    to_close.callback(place.abort)
                    with place.named():
                        future = place.file.write_from(
                            array, sync=True, priority=priority, checksums=checksums
                        )
                    to_close.callback(future._abandon)
                    writing.append((path, place, future))
            for path, place, future in writing:
                with _collected(failures, path):
                    with place.named():
                        future.result()
                    place.commit(sync_names=sync)
    if failures:
        raise first_of(failures, "of this call")


@contextlib.contextmanager
def _collected(failures: list[StorageError], path: AnyPath) -> Iterator[None]:
    try:
        with storage_errors(path):
            yield
    except StorageError as error:
        failures.append(error)


def _found(path: AnyPath) -> tuple[Path, os.stat_result | None]:
    """Return the path that one leads to by symbolic links, and what is there, None if nothing is."""
    asked = kept_path(path)
    if asked.endswith(("/", "/.", "/..")):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), asked)
    for _ in range(_LOOKS_MAX):
        target = os.path.realpath(asked)
        # What the kernel finds need not be what the text of a link says: in /proc it may be a file that was deleted.
        found = _status(asked)
        status = found if target == asked else _status(target)
        if found is status or (found and status and os.path.samestat(found, status)):
            break
    else:
        if found is None:  # by a directory that is missing
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), asked)
        raise ValueError(f"path: {path!r} leads to a file that is not at {target!r}")
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise ValueError(f"path: {target!r} is no regular file")
    return Path(target), status


def _status(path: str) -> os.stat_result | None:
    try:
        return Path(path).stat()
    except FileNotFoundError:
        return None


def _keep_rights(descriptor: int, path: str, old: os.stat_result) -> None:
    """Give a new file owner, group, ACL and permissions of the old one; nobody else gets a right that he had not."""
    mode, new = stat.S_IMODE(old.st_mode), os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(descriptor, old.st_uid, old.st_gid)
        except OSError:
            mode &= ~(stat.S_ISUID | stat.S_ISGID)
            try:
                os.fchown(descriptor, -1, old.st_gid)
            except OSError:  # the new group is among the others of the old file
                mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    try:
        acl, own = _acl_of(path), _acl_of(descriptor)  # a directory may give one to new files
        if acl is not None:
            os.setxattr(descriptor, _ACL, acl)
        elif own is not None:
            os.removexattr(descriptor, _ACL)
    except OSError:  # with an ACL these bits were not the group's, but the most that it gives
        mode &= ~stat.S_IRWXG
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        # The file then has those that it was made with, which are its owner's alone.
        if error.errno not in _NO_PERMISSIONS:
            raise


def _acl_of(file: str | int) -> bytes | None:
    try:
        return os.getxattr(file, _ACL)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        return None

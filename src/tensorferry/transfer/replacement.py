"""Atomic replacement of a file: write a temporary file, fsync it, and rename it to the target.

FUSE file systems of object stores may not support permissions, a second descriptor, or renaming an open file. This
module works without these. It does need rename(), and tests it before any data is written.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import absolute_path
from tensorferry.base.processes import Owned
from tensorferry.errors import StorageError, first_error, missing_folder
from tensorferry.transfer import sidecars
from tensorferry.transfer.files import File
from tensorferry.transfer.new_file import NewFile
from tensorferry.transfer.publication import (
    TEMPORARY_NAME,
    Temporary,
    check_renames,
    new_name,
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

# Files that are replaced concurrently. Each needs three descriptors, so a descriptor limit may allow fewer.
_MAX_CONCURRENT = 16
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)

# Errors of fchmod() on file systems that have no permissions or do not let a process change them.
_NO_PERMISSIONS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_ACL = "system.posix_acl_access"

# _resolve() resolves a path and looks up the file by the original and by the resolved path, up to this number of times,
# until both lookups find the same file. Another process may replace the file between the two lookups, so a single
# difference does not prove that the resolved path is wrong.
_MAX_LOOKUPS = 100


class Target(Owned):
    """A new file that will replace the file at a path.

    A context manager: at the end of the block the new file is renamed to the path, unless the block raises.

    Parameters
    ----------
    path : str, bytes or PathLike
        The path of the file to replace; a symbolic link is followed. Owner, group, permissions and POSIX ACL of the
        existing file are kept as far as this process may set them; where it may not, no other user gains a right.
    sync : bool
        Make the new file durable.
    has_sidecar : bool
        Whether the old file may have a sidecar (:mod:`tensorferry.transfer.sidecars`) although it does not have the
        name of a safetensors file. The sidecar is removed when the old file is replaced.
    direct : "auto", True or False
        As for :func:`tensorferry.write`.

    Raises
    ------
    ValueError
        The path names something that is not a regular file, or a file that has been deleted.
    StorageError, OSError
        The new file cannot be created.

    Attributes
    ----------
    target : str
        The path that the new file will have.
    """

    def __init__(
        self, path: AnyPath, *, sync: bool, has_sidecar: bool = False, direct: Direct = "auto"
    ) -> None:
        target, old = _resolve(path)
        self.target = str(target)
        self._sidecars = sidecars.paths_of(path) if has_sidecar or sidecars.is_usual(path) else []
        self._last_name = target.name
        self._sync, self._direct = sync, direct
        self._finished = self._is_open = False
        self._set_owner()
        with self.naming_target():
            # With mode 0600 no other user can open the new file before it has the old file's permissions.
            self._new = self._create(target.parent, 0o666 if old is None else 0o600)
            try:
                self._make(target, old)
            except BaseException:
                self._new.remove()
                raise

    def _create(self, directory: Path, mode: int) -> Temporary:
        try:
            return Temporary(directory, mode)
        except FileNotFoundError as error:
            if problem := missing_folder(self.target):
                error.strerror = f"{error.strerror} ({problem})"
            raise

    def _make(self, target: Path, old: os.stat_result | None) -> None:
        if not self._new.is_local:
            check_renames(target.parent, replaced=old is not None)
        if old is not None:
            _copy_permissions(self._new.descriptor, self.target, old)
        self._open(self._new.descriptor)
        self._is_open = True

    def _open(self, descriptor: int) -> None:
        """Open the file of a descriptor for writing."""
        self._file = File._from_descriptor(descriptor, direct=self._direct)

    def _finish(self) -> None:
        """Write the remaining bytes, make the data durable if requested, and close the file."""
        self._file.close()

    def _abort(self) -> None:
        """Close the file once no write to it is in flight."""
        self._file.close()

    def finish(self) -> None:
        """Write the remaining bytes; with ``sync`` the data is then durable. A later :meth:`commit` only renames."""
        with self.naming_target():
            self._finish()
        self._finished = True

    def commit(self, *, sync_names: bool = True) -> None:
        """Finish the file, rename it to the target, and close it.

        With ``sync_names=False`` the caller makes the rename durable.

        Raises
        ------
        StorageError, OSError
            The file could not be written completely, made durable, or renamed. The old file is still there, unless
            only the rename could not be made durable.
        """
        try:
            if not self._finished:
                self.finish()
            with self.naming_target():
                self._publish(sync_names=sync_names)
        except BaseException:
            self._abandon()
            raise
        finally:
            self._new.remove()

    def abort(self) -> None:
        """Discard the new file; the old file stays. After :meth:`commit` or :meth:`abort` a call has no effect."""
        try:
            self._abandon()
        finally:
            self._new.remove()

    def retarget(self, name: str) -> None:
        """Have :meth:`commit` rename the file to another name in the same directory."""
        path = Path(self.target).with_name(name)
        self.target, self._last_name = str(path), name
        self._sidecars = sidecars.paths_of(path)

    @contextlib.contextmanager
    def naming_target(self) -> Iterator[None]:
        """In errors that the block raises for the new file, replace its temporary name with the target path."""
        try:
            yield
        except OSError as error:
            found, directory = str(error.filename), str(Path(self.target).parent)
            # Without /proc the core names the temporary file by its descriptor.
            if (
                error.filename in (None, directory)
                or TEMPORARY_NAME.search(found)
                or found.startswith("descriptor ")
            ):
                error.filename = self.target
                if error.filename2 is not None:
                    del error.filename2
            raise

    def __del__(self) -> None:
        if hasattr(self, "_new") and self._new.directory >= 0:
            self.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def _publish(self, *, sync_names: bool) -> None:
        # The new file must never be seen together with the sidecar of the old one, not even after a power cut.
        with self._sidecars_aside():
            self._new.rename(self._last_name)
        if self._sync and sync_names:
            sync_open_directory(self._new.directory)

    @contextlib.contextmanager
    def _sidecars_aside(self) -> Iterator[None]:
        """Remove the sidecars; if the block raises, they are back afterwards.

        Meanwhile they have names of temporary files, which are removed later if this process is killed.
        """
        aside: list[tuple[Path, Path]] = []
        try:
            for path in self._sidecars:
                try:
                    if path.is_dir():
                        continue
                    aside.append((path.with_name(new_name()), path))
                    path.rename(aside[-1][0])
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
                        raise
                    continue
                if self._sync:
                    sync_directory(path.parent)
            yield
        except BaseException:
            for other, path in aside:
                with contextlib.suppress(OSError):  # the original error matters more
                    other.rename(path)
            raise
        # Another process may have written a sidecar for the old file meanwhile.
        for path in itertools.chain(*aside, self._sidecars):
            with contextlib.suppress(OSError):
                path.unlink()

    def _abandon(self) -> None:
        if self._is_open and not self.is_parents:
            # The file is discarded: only the error for which it is discarded matters.
            with contextlib.suppress(OSError):
                self._abort()


class Replacement(Target):
    """A replacement file that is written sequentially, by a stream; see :class:`Target`.

    Parameters
    ----------
    path, sync, has_sidecar
        As for :class:`Target`.
    reserve_nbytes : int
        Space to reserve immediately.
    checksums : Checksums, optional
        The checksums to compute of the bytes written.

    Raises
    ------
    ValueError, StorageError, OSError
        As for :class:`Target`, or there is not enough space.

    Attributes
    ----------
    file : NewFile
        The new file.
    """

    file: NewFile

    def __init__(
        self,
        path: AnyPath,
        *,
        sync: bool,
        reserve_nbytes: int = 0,
        checksums: Checksums | None = None,
        has_sidecar: bool = False,
    ) -> None:
        self._reserve_nbytes = reserve_nbytes
        self._checksums = checksums
        super().__init__(path, sync=sync, has_sidecar=has_sidecar)

    def _open(self, descriptor: int) -> None:
        super()._open(descriptor)
        self.file = NewFile(
            self._file, reserve_nbytes=self._reserve_nbytes, checksums=self._checksums
        )

    def _finish(self) -> None:
        self.file.finish(self._sync)

    def _abort(self) -> None:
        self.file.abort()


def replace_files(
    items: Sequence[tuple[AnyPath, Any]],
    *,
    sync: bool,
    direct: Direct,
    priority: Priority,
    checksums: Checksums | None = None,
) -> None:
    """Replace several files atomically, each with one array or several; the data is durable before the rename.

    Parameters
    ----------
    items
        Pairs of path and array. The paths are all different, and the arrays have been checked.
    sync : bool
        Return only when the names are durable, too.
    direct, priority, checksums
        As for :func:`tensorferry.write`.

    Raises
    ------
    StorageError
        The error of the first file that failed; ``others`` has further ones. Files that failed keep their old content,
        all others have been replaced.
    """
    # Raise ValueError for an invalid path before anything is written. An OSError is suppressed here, because the loop
    # below raises it again for this file and collects it with the errors of the other files.
    for path, _ in items:
        with contextlib.suppress(OSError):
            _resolve(path)
    failures: list[StorageError] = []
    remaining = deque(items)
    while remaining:
        with contextlib.ExitStack() as to_close:
            writing: list[tuple[AnyPath, Target, Future[Any]]] = []
            while remaining and len(writing) < _MAX_CONCURRENT:
                path, array = remaining.popleft()
                with _collect_errors(failures, path):
                    try:
                        replacement = Target(path, sync=True, direct=direct)
                    except OSError as error:
                        if writing and error.errno in _TOO_MANY_FILES:
                            remaining.appendleft((path, array))
                            break
                        raise
                    to_close.callback(replacement.abort)
                    with replacement.naming_target():
                        future = replacement._file.write_from(
                            array, sync=True, priority=priority, checksums=checksums
                        )
                    if checksums is not None:
                        checksums._has_succeeded = lambda: False  # before the file is in place
                    to_close.callback(future._abandon)
                    writing.append((path, replacement, future))
            for path, replacement, future in writing:
                with _collect_errors(failures, path):
                    with replacement.naming_target():
                        future.result()
                    replacement.commit(sync_names=sync)
                    if checksums is not None:
                        checksums._has_succeeded = lambda: True
    if failures:
        raise first_error(failures, "of this call")


@contextlib.contextmanager
def _collect_errors(failures: list[StorageError], path: AnyPath) -> Iterator[None]:
    try:
        with storage_errors(path):
            yield
    except StorageError as error:
        failures.append(error)


def _resolve(path: AnyPath) -> tuple[Path, os.stat_result | None]:
    """Return a path with its symbolic links resolved, and the status of the file there, or None if there is no file."""
    asked = absolute_path(path)
    if asked.endswith(("/", "/.", "/..")):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), asked)
    for _ in range(_MAX_LOOKUPS):
        target = os.path.realpath(asked)
        # The kernel may find another file than the text of a link names: a link in /proc may refer to a deleted file.
        found = _status(asked)
        status = found if target == asked else _status(target)
        if found is status or (found and status and os.path.samestat(found, status)):
            break
    else:
        if found is None:  # a directory of the path is missing
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), asked)
        raise ValueError(
            f"path: the file that {path!r} refers to has been deleted, or has another path than {target!r} (remedy: "
            "pass its present path)"
        )
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise ValueError(f"path: {target!r} is not a regular file")
    return Path(target), status


def _status(path: str) -> os.stat_result | None:
    try:
        return Path(path).stat()
    except FileNotFoundError:
        return None


def _copy_permissions(descriptor: int, path: str, old: os.stat_result) -> None:
    """Copy owner, group, ACL and permissions of the old file to the new one, without adding a right for anyone.

    If this process may not set one of them, the permissions are reduced instead.
    """
    mode, new = stat.S_IMODE(old.st_mode), os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(descriptor, old.st_uid, old.st_gid)
        except OSError:
            mode &= ~(stat.S_ISUID | stat.S_ISGID)
            try:
                os.fchown(descriptor, -1, old.st_gid)
            except OSError:
                # Members of the new file's group had the rights of "others" on the old file.
                mode &= ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    try:
        # A directory's default ACL may have given the new file one.
        acl, own = _acl_of(path), _acl_of(descriptor)
        if acl is not None:
            os.setxattr(descriptor, _ACL, acl)
        elif own is not None:
            os.removexattr(descriptor, _ACL)
    except OSError:
        # The ACL could not be copied. The group bits of a file with an ACL are the ACL's mask, which may allow more
        # than the group's own entry (acl(5)).
        mode &= ~stat.S_IRWXG
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        # The file then keeps the mode 0600 that it was created with.
        if error.errno not in _NO_PERMISSIONS:
            raise


def _acl_of(file: str | int) -> bytes | None:
    try:
        return os.getxattr(file, _ACL)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        return None

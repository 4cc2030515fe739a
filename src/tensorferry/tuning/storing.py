"""Keeping what was found: the file of profiles changes as a whole, where its links lead, and keeps its permissions."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.transfer.profiles import VERSION, FileSystem, Profile, Use, read
from tensorferry.transfer.replacement import Target

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_writable(path: Path) -> None:
    """Find out whether profiles can be saved in a file, before it takes minutes to find one.

    Raises
    ------
    OSError
        They cannot.
    """
    target = _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target.parent).close()
        if os.path.lexists(target) and not target.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(path)) from None


def store(path: Path, file_system: FileSystem, found: dict[Use, Profile | None]) -> list[Use]:
    """Keep the profiles found for some uses of a file system, and drop earlier ones where None was found.

    A file that cannot be read is kept under another name.

    Returns
    -------
    list
        The uses of which a profile was dropped.

    Raises
    ------
    OSError
        It cannot be written; the old one stays.
    """
    path = _target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        try:
            profiles = read(path)
        except FileNotFoundError:
            profiles = []
        except ValueError as problem:
            kept = path.with_name(f"{path.stem[:40]}.unusable")
            path.replace(kept)
            warnings.warn(f"{path}: {problem}; kept as {kept}", RuntimeWarning, stacklevel=2)
            profiles = []
        old = [p for p in profiles if p.file_system.is_same(file_system) and p.use in found]
        new = [profile for profile in found.values() if profile is not None]
        if old or new:
            _replace(path, [*(p for p in profiles if p not in old), *new])
    return [p.use for p in old if found[p.use] is None]


def forget(path: Path, file_system: FileSystem | None = None) -> list[Profile]:
    """Remove one file system's profile from a file, or all with the file itself; return what was removed.

    Raises
    ------
    OSError
        It cannot be changed, or is no regular file.
    ValueError
        It holds no profiles, and one file system's was asked for.
    """
    path = _target(path)
    if not os.path.lexists(path):
        return []
    with _locked(path.parent):
        try:
            profiles = read(path)
        except ValueError:
            if file_system is not None:
                raise
            profiles = []
        removed = [p for p in profiles if file_system is None or p.file_system.is_same(file_system)]
        kept = [each for each in profiles if each not in removed]
        if removed or not kept:
            _replace(path, kept)
    return removed


def _target(path: Path) -> Path:
    """Return where links lead; Path.resolve would raise RuntimeError where they lead in a circle."""
    return Path(os.path.realpath(path))


def _replace(path: Path, profiles: list[Profile]) -> None:
    """Replace the file as a whole, with its permissions, or remove it: readers see the old one or the new one."""
    if not profiles:
        path.unlink()
        return
    entries = [dataclasses.asdict(profile) for profile in profiles]
    content = {"version": VERSION, "profiles": entries}
    _TextFile(path, json.dumps(content, indent=2) + "\n").commit()


class _TextFile(Target):
    """A place whose file is written by Python: our own writes would begin to go by the profiles before these."""

    def __init__(self, path: Path, text: str) -> None:
        self._text = text
        super().__init__(path, sync=True)

    def _open(self) -> None:
        pass

    def _finish(self) -> None:
        with open(self._descriptor, "w", encoding="utf-8", closefd=False) as file:
            file.write(self._text)
            file.flush()
            os.fsync(file.fileno())

    def _abort(self) -> None:
        pass


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep others from changing the file between reading and replacing it. The lock goes with the descriptor."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems lock no directories
            if error.errno not in (errno.EBADF, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
        yield
    finally:
        os.close(descriptor)
